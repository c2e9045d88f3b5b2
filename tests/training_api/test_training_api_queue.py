"""The queue of a model's requests, without a model."""

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxtrain.environments.request_fields import RequestRefused
from jaxtrain.errors import UserError
from jaxtrain.training_api import model_queue
from jaxtrain.training_api.futures import Entry
from jaxtrain.training_api.journal import Journal, Record
from jaxtrain.training_api.model_queue import ModelQueue


class Number:
    """Operations on a number: a step adds the gradients."""

    model_id, model = "session:train:0", None

    def __init__(self, folder):
        self.folder, self.runs = folder, []
        self.forget()

    def forget(self):
        self.total, self.sums, self.failed, self.pending = 0, [], "", False

    def run(self, operation, request_id, payload):
        value = json.loads(payload)
        self.runs.append(operation)
        if value == "fail":
            raise TypeError("of the server")
        if operation == "forward_backward":
            self.sums.append(value)
        if operation == "optim_step":
            sums, failed = self.sums, self.failed
            self.sums, self.failed = [], ""
            if failed:
                raise UserError(failed)
            self.total += sum(sums)
        return {"total": self.total}

    run_again = run

    def adds_gradients(self, operation, payload):
        return operation == "forward_backward"

    def drop(self, reason):
        self.failed = self.failed or reason

    def save_snapshot(self, cursor):
        raise UserError("no snapshots here")

    def open_snapshot(self):
        self.forget()


@pytest.fixture
def thread():
    with ThreadPoolExecutor(1) as executor:
        yield executor


def open_queue(folder, thread):
    return ModelQueue(Number(folder), Journal(folder / "requests.log"), thread)


async def answer(queue, seq_id, operation, value=0):
    entry = await queue.submit(seq_id, operation, json.dumps(value).encode())
    await asyncio.wait_for(entry.done.wait(), 10)
    return json.loads(entry.result.body)


def test_a_restart_drops_nothing_for_late_requests_and_repeats_no_server_failure(
    tmp_path, thread, monkeypatch
):
    monkeypatch.setattr(model_queue, "GAP_SECONDS", 0.05)

    async def first():
        queue = open_queue(tmp_path, thread)
        queue.start()
        await answer(queue, 0, "create_model")
        assert "did not come" in (await answer(queue, 2, "forward_backward", 1))["error"]
        assert "did not come" in (await answer(queue, 3, "optim_step"))["error"]
        await answer(queue, 4, "forward_backward", 10)
        assert "too late" in (await answer(queue, 1, "forward_backward", 1))["error"]
        assert await answer(queue, 5, "optim_step") == {"total": 10}
        failed = await answer(queue, 6, "optim_step", "fail")
        assert failed == {"error": "the server failed: TypeError", "category": "server"}
        await answer(queue, 7, "forward_backward", 100)
        await queue.close()

    async def second():
        queue = open_queue(tmp_path, thread)
        queue.start()
        assert await answer(queue, 8, "optim_step") == {"total": 110}
        await queue.close()

    asyncio.run(first())
    asyncio.run(second())


def test_a_replay_that_fails_where_the_request_did_not_opens_no_model(tmp_path, thread):
    def refuse(*request):
        raise UserError("another base")

    async def run(seq_id, operation, run_again):
        queue = open_queue(tmp_path, thread)
        queue.operations.run_again = run_again
        queue.start()
        result = await answer(queue, seq_id, operation)
        await queue.close()
        return result

    assert asyncio.run(run(0, "create_model", refuse)) == {"total": 0}
    result = asyncio.run(run(1, "optim_step", refuse))
    assert "cannot be opened: UserError: another base" in result["error"]


class Ended(BaseException):
    """Ends the worker, and leaves the log, as a kill ends a server."""


def test_a_request_that_ends_every_server_is_refused_by_its_number(tmp_path, thread, monkeypatch):
    monkeypatch.setattr(model_queue, "MAX_RESTARTS", 2)

    def end(operation, request_id, payload):
        raise Ended

    async def serve():
        queue = open_queue(tmp_path, thread)
        queue.journal.rewrite(queue._records())  # a snapshot keeps the count
        queue.start()
        if not queue.entries:
            await answer(queue, 0, "create_model")
        queue.operations.run = end
        entry = await queue.submit(1, "forward_backward", b"7")
        done = asyncio.ensure_future(entry.done.wait())
        await asyncio.wait([queue._worker, done], timeout=10, return_when="FIRST_COMPLETED")
        if queue._worker.done():
            done.cancel()
            queue.journal.close()
            return queue._worker.exception()
        queue.operations.run = queue.operations.run_again
        step = await answer(queue, 2, "optim_step")
        await queue.close()
        return entry.result, step["error"]

    assert [type(asyncio.run(serve())) for _ in range(3)] == [Ended] * 3
    result, step = asyncio.run(serve())
    assert result.category == "server"
    assert "forward_backward of seq_id 1 is refused: 3 servers ended" in result.message
    assert step == "forward_backward of seq_id 1 failed"


def test_a_model_that_ends_every_server_while_it_is_brought_back_is_set_aside(
    tmp_path, thread, monkeypatch, capsys
):
    monkeypatch.setattr(model_queue, "MAX_RESTARTS", 2)
    counted, counts = tmp_path / model_queue.OPENING, []

    async def create():
        queue = open_queue(tmp_path, thread)
        queue.start()
        await answer(queue, 0, "create_model")
        await queue.close()

    async def show():
        queue = open_queue(tmp_path, thread)
        queue.operations.run_again = lambda *request: counts.append(counted.read_text())
        try:
            await queue.show()
        finally:
            await queue.close()

    asyncio.run(create())
    asyncio.run(show())
    assert not counted.exists()
    counted.write_text("1")  # a server was killed
    asyncio.run(show())
    assert counts == ["1", "2"] and not counted.exists()
    counted.write_text("2")
    with pytest.raises(RequestRefused, match="2 servers ended while they brought session:train:0"):
        asyncio.run(show())
    assert f"remove {counted}" in capsys.readouterr().err and len(counts) == 2


def test_a_model_set_aside_is_tried_again_once_its_file_is_removed(tmp_path, thread, monkeypatch):
    """Without a restart; what waited is run, too."""
    monkeypatch.setattr(model_queue, "MAX_RESTARTS", 2)
    counted = tmp_path / model_queue.OPENING

    async def run():
        queue = open_queue(tmp_path, thread)
        counted.write_text("2")
        queue.start()
        entry = await queue.submit(0, "create_model", b"1")
        await asyncio.wait_for(entry.done.wait(), 10)
        assert "2 servers ended" in entry.result.message
        with pytest.raises(RequestRefused, match="2 servers ended"):
            await queue.submit(1, "forward_backward", b"3")
        counted.unlink()
        await answer(queue, 1, "forward_backward")
        assert json.loads(entry.result.body) == {"total": 0} and not queue.waiting
        await queue.close()
        return queue.operations.runs

    assert asyncio.run(run()) == ["create_model", "forward_backward"]


def test_a_full_disk_does_not_keep_a_model_closed(tmp_path, thread, monkeypatch, capsys):
    def fail(*args):
        raise OSError(28, "no space left")

    async def run():
        queue = open_queue(tmp_path, thread)
        monkeypatch.setattr(model_queue, "write_atomically", fail)
        queue.start()
        assert await answer(queue, 0, "create_model") == {"total": 0}
        await queue.close()

    asyncio.run(run())
    assert "opening cannot be written: [Errno 28] no space left" in capsys.readouterr().err


def test_a_full_disk_delays_a_request_that_is_run_again(tmp_path, thread, monkeypatch, capsys):
    monkeypatch.setattr(model_queue, "RETRY_SECONDS", 0.01)
    journal, payload = Journal(tmp_path / "requests.log"), b"0"
    for seq_id in range(2):  # the second one was waiting when the server ended
        entry = Entry(f"session:train:0/{seq_id}", seq_id, "create_model", "digest", payload)
        journal.append(entry.request_record())
    journal.close()

    async def run():
        queue = open_queue(tmp_path, thread)
        append, failures = queue.journal.append, [OSError("no space left")]

        def fail_once(record):
            if failures:
                raise failures.pop()
            append(record)

        queue.journal.append = fail_once
        queue.start()
        await asyncio.wait_for(queue.entries[1].done.wait(), 10)
        await queue.close()
        return [(entry.restarts, json.loads(entry.result.body)) for entry in queue.entries.values()]

    assert asyncio.run(run()) == [(1, {"total": 0}), (0, {"total": 0})]
    assert "requests.log cannot be written: no space left" in capsys.readouterr().err


def test_a_log_that_is_damaged_in_the_middle_opens_no_model(tmp_path, thread):
    async def run():
        queue = open_queue(tmp_path, thread)
        queue.start()
        for seq_id in range(2):
            await answer(queue, seq_id, "create_model")
        await queue.close()
        raw = bytearray((tmp_path / "requests.log").read_bytes())
        raw[40] ^= 1
        (tmp_path / "requests.log").write_bytes(raw)
        queue = open_queue(tmp_path, thread)
        queue.start()
        with pytest.raises(RequestRefused, match="record 1, at byte 0, is damaged") as refusal:
            await queue.submit(2, "optim_step", b"0")
        await queue.close()
        assert refusal.value.status == 409
        assert (tmp_path / "requests.log").read_bytes() == raw

    asyncio.run(run())


def test_a_request_whose_client_hangs_up_is_run(tmp_path, thread):
    async def run():
        queue = open_queue(tmp_path, thread)
        queue.start()
        going, append = threading.Event(), queue.journal.append

        def wait_and_append(*records):
            going.wait(10)
            append(*records)

        queue.journal.append = wait_and_append
        sent = asyncio.ensure_future(queue.submit(0, "create_model", b"0"))
        await asyncio.sleep(0.05)
        assert not queue.operations.runs  # not before it is on disk
        sent.cancel()
        await asyncio.gather(sent, return_exceptions=True)
        going.set()
        assert await answer(queue, 0, "create_model") == {"total": 0}
        assert queue.operations.runs == ["create_model"] and not queue.waiting
        await queue.close()

    asyncio.run(run())


def test_a_late_request_that_a_killed_server_has_not_refused_is_refused(tmp_path, thread):
    late = Record({"request": {"id": "m/1", "seq_id": 1, "operation": "o", "digest": "d"}})
    ended = {"id": "m/2", "seq_id": 2, "operation": "o", "digest": "d"}
    result = {"result": 2, "kind": "json", "ran": False}
    journal = Journal(tmp_path / "requests.log")
    journal.append(Record({"request": ended}), Record(result, b"{}"), late)
    journal.close()

    async def run():
        queue = open_queue(tmp_path, thread)
        queue.start()
        entry = queue.entries[1]
        await asyncio.wait_for(entry.done.wait(), 10)
        await queue.close()
        return entry.result.message, queue.waiting

    assert asyncio.run(run()) == ("seq_id 1 came too late", {})


def test_a_request_that_is_logged_beside_a_snapshot_stays_in_the_log(tmp_path, thread):
    queue, entry = open_queue(tmp_path, thread), Entry("m/1", 1, "optim_step", "d")
    queue.operations.save_snapshot = lambda cursor: None
    rewrite = queue.journal.rewrite

    def log_and_rewrite(records):
        queue.entries[1] = entry
        queue.journal.append(entry.request_record())
        rewrite(records)

    queue.journal.rewrite = log_and_rewrite
    queue._try_snapshot({"seq_id": 0})
    assert queue.journal.read() == [entry.request_record()]


def test_requests_without_a_step_do_not_grow_the_log_without_bound(tmp_path, thread, monkeypatch):
    monkeypatch.setattr(model_queue, "SNAPSHOT_BYTES", 5_000)
    snapshots = []

    async def run():
        queue = open_queue(tmp_path, thread)
        queue.operations.save_snapshot = lambda cursor: snapshots.append(cursor["seq_id"])
        queue.operations.model = "a model"
        queue.start()
        for seq_id in range(30):
            await answer(queue, seq_id, "forward", "x" * 1_000)
        sizes = [len(entry.payload) for entry in queue.entries.values()]
        await queue.close()
        return queue.journal.size, sum(sizes)

    log_size, memory = asyncio.run(run())
    assert 30 * 1_000 > 20_000 > log_size and memory < 10_000
    assert len(snapshots) >= 3 and snapshots == sorted(set(snapshots))
    restarted = Journal(tmp_path / "requests.log")
    results = [header["result"] for header, _ in restarted.read() if "result" in header]
    assert results == list(range(30))


def test_forward_passes_leave_neither_bodies_nor_results_in_memory(tmp_path, thread, monkeypatch):
    monkeypatch.setattr(model_queue, "MAX_READ_BYTES", 5_000)

    async def run(count):
        queue = open_queue(tmp_path, thread)
        passes = {"adds_gradients": lambda *request: False, "run": lambda *request: b"x" * 1_000}
        vars(queue.operations).update(passes, run_again=lambda *request: None)
        queue.start()
        for seq_id in range(count, count + 20):
            await answer_bytes(queue, seq_id, b"y" * 1_000)
            if seq_id % 2:
                queue.note_read(queue.entries[seq_id])
        held = [len(entry.result.body) for entry in queue.entries.values()]
        if count:
            monkeypatch.setattr(model_queue, "UNREAD_SECONDS", 0.0)
            await answer_bytes(queue, count + 20, b"")
        await queue.close()
        bodies = [len(entry.payload) for entry in list(queue.entries.values())[count:]]
        return bodies, held, [len(entry.result.body) for entry in queue.entries.values()]

    async def answer_bytes(queue, seq_id, payload):
        entry = await queue.submit(seq_id, "forward_backward", payload)
        await asyncio.wait_for(entry.done.wait(), 10)

    bodies, held, _ = asyncio.run(run(0))
    assert not any(bodies)
    assert held[::2] == [1_000] * 10, "an answer that was not read is held"
    assert 4_000 <= sum(held[1::2]) <= 6_000
    assert held[1::2] == sorted(held[1::2]), "older ones go first"
    bodies, _, last = asyncio.run(run(20))
    assert not any(bodies) and sum(last) <= 6_000, "after a day these, too, are dropped"


def test_a_log_that_has_grown_waits_for_the_step_of_its_gradients(tmp_path, thread, monkeypatch):
    monkeypatch.setattr(model_queue, "SNAPSHOT_BYTES", 500)
    snapshots = []

    async def run():
        queue = open_queue(tmp_path, thread)
        queue.operations.save_snapshot = snapshots.append
        queue.start()
        await answer(queue, 0, "create_model")
        queue.operations.model, queue.operations.pending = "a model", True
        for seq_id in range(1, 6):
            await answer(queue, seq_id, "forward", "x" * 1_000)
        await queue.close()
        return queue.journal.size

    assert asyncio.run(run()) > 5_000 and not snapshots
