"""More hosts than the trainer sends a version to: they pass it on, whoever of them fails."""

import socket
import threading
import time

import numpy as np
import pytest
from staged_hosts import ONE, WHOLE, Trainer, Worker

from jaxtrain.generation.vllm.control import ServerGone
from jaxtrain.generation.weight_sync import relays, staging
from jaxtrain.generation.weight_sync.weight_links import WeightLinks
from jaxtrain_vllm import handshake, wire
from jaxtrain_vllm.payloads import PayloadFetch, PayloadOffers, cut


def open_fleet(hosts: int, fan_out: int) -> tuple[Trainer, list[Worker]]:
    trainer = Trainer(fan_out=fan_out)
    trainer.hosts = hosts
    return trainer, [Worker(f"host{i}") for i in range(hosts)]


def listening(workers: list[Worker]) -> list[Worker]:
    return [worker for worker in workers if worker.shelf._listener is not None]


def spoil(workers: list[Worker], answer) -> None:
    """Answers of every worker that relays a version."""
    for worker in workers:
        worker.shelf._offers.answer = answer


def test_the_trainer_sends_a_version_to_a_few_hosts_and_these_pass_it_on():
    trainer, workers = open_fleet(12, fan_out=2)
    trainer.make()
    assert trainer.push_weights(workers) == 2 * WHOLE
    assert trainer.counted["sync/bytes"] == 12 * WHOLE
    assert trainer.counted["sync/relayed_bytes"] == 10 * WHOLE
    for position in (3, 200):
        trainer.make(position)
        assert trainer.push_weights(workers[::-1]) == 2 * ONE
        assert trainer.counted["sync/relayed_bytes"] == 10 * ONE
    assert trainer.counted["sync/relay_failures"] == 0


def test_nobody_listens_where_the_trainer_sends_it_to_all():
    for hosts, fan_out in ((3, 3), (3, 0)):
        trainer, workers = open_fleet(hosts, fan_out)
        trainer.make()
        assert trainer.push_weights(workers) == hosts * WHOLE
        assert not listening(workers)


def test_who_missed_versions_or_is_new_gets_what_it_lacks():
    trainer, workers = open_fleet(4, fan_out=1)
    local_result, away, new = workers[:2], workers[2], workers[3]
    trainer.make()
    trainer.push_weights([*local_result, away])
    for position in (1, 2):
        trainer.make(position)
        trainer.push_weights(local_result)
    trainer.make(3)
    assert trainer.push_weights(local_result) == ONE == trainer.counted["sync/relayed_bytes"]
    assert trainer.push_weights([away]) == 3 * ONE, "which nobody else was sent"
    assert trainer.counted["sync/chains"] == 1
    assert trainer.push_weights([new]) == 0, "whole, from a host that was sent changes"
    assert trainer.counted["sync/relayed_bytes"] == WHOLE


def hang_up(connection, request):
    connection.close()


def lie(connection, request):
    size = request["stop"] - request["start"]
    wire.send_message(connection, {}, [np.zeros(size, np.uint8)])
    connection.close()


def refuse(connection, request):
    PayloadOffers().answer(connection, request)


@pytest.mark.parametrize("answer", [hang_up, lie, refuse])
def test_who_gets_nothing_from_a_host_gets_it_from_the_trainer(answer):
    trainer, workers = open_fleet(6, fan_out=2)
    spoil(workers, answer)
    trainer.make()
    assert trainer.push_weights(workers) == 6 * WHOLE
    assert 1 <= trainer.counted["sync/relay_failures"] <= 4 * relays.MAX_FAILURES
    trainer.make(7)
    assert trainer.push_weights(workers) == 6 * ONE, "a delta that failed leaves its base as it was"


def test_a_host_that_is_gone_is_asked_no_more():
    """Two have it and the one dies: the others get it from the one that is left."""
    trainer, workers = open_fleet(5, fan_out=2)
    trainer.make()
    trainer.push_weights(workers[:2])
    workers[0].there.shutdown(socket.SHUT_RDWR)
    workers[0].link.close()
    assert trainer.push_weights(workers[2:]) == 0


def test_a_slow_host_holds_nobody_up(monkeypatch):
    monkeypatch.setattr(relays, "MORE_SECONDS", 0.1)
    over = threading.Event()
    trainer, workers = open_fleet(4, fan_out=1)
    spoil(workers, lambda connection, request: over.wait(10))
    trainer.make()
    started = time.monotonic()
    assert trainer.push_weights(workers) == 4 * WHOLE
    assert time.monotonic() - started < 4
    over.set()


def test_first_hosts_that_hang_keep_the_others_waiting_no_longer_than_they_may():
    """Nobody goes on without the version: who hangs fails, the others are sent it."""
    trainer, workers = open_fleet(4, fan_out=2)
    over = threading.Event()
    for worker in workers[:2]:
        worker.shelf.answer = lambda header, payload: over.wait(10) and {}
    trainer.make()
    errors = []

    def first() -> None:
        try:
            trainer.push_weights(workers[:2], seconds=1.5)
        except ServerGone as error:
            errors.append(str(error))

    thread = threading.Thread(target=first)
    thread.start()
    while trainer.staging.relays._direct < 2:
        time.sleep(0.01)
    trainer.push_weights(workers[2:], seconds=0.9)
    assert [worker.shelf.version for worker in workers[2:]] == [0, 0]
    thread.join()
    over.set()
    assert "took longer" in errors[0]
    assert [worker.shelf.version for worker in workers[:2]] == [-1, -1]


def test_a_host_answers_who_knows_the_token_and_only_what_it_has():
    trainer, workers = open_fleet(2, fan_out=1)
    trainer.make()
    trainer.push_weights(workers)
    gate = listening(workers)[0].shelf._listener
    assert {listener.getsockname()[0] for listener in gate.listeners} == {"127.0.0.1"}
    position, room = ("127.0.0.1", gate.port), np.empty(WHOLE, np.uint8)
    with pytest.raises(handshake.HandshakeRefused):
        PayloadFetch().run(position, b"another", "0/0/full", room.data, streams=1, seconds=5)
    with pytest.raises(wire.WireError, match="not here"):
        PayloadFetch().run(position, b"token", "0/0/full", room.data, streams=2, seconds=5)
    name = next(iter(listening(workers)[0].shelf._offers._parts))
    PayloadFetch().run(position, b"token", name, room.data, streams=3, seconds=5)
    sent = [tensor.bits.view(np.uint8) for tensor in trainer.image.tensors.values()]
    np.testing.assert_array_equal(room, np.concatenate(sent))
    with pytest.raises(wire.WireError, match="not here"):  # longer than what is there
        PayloadFetch().run(
            position, b"token", name, np.empty(WHOLE + 1, np.uint8).data, streams=1, seconds=5
        )
    trainer.make(1)
    trainer.push_weights(workers)
    assert name not in listening(workers)[0].shelf._offers._parts, "it is another version by now"
    for worker in workers:
        worker.link.close()
    deadline = time.monotonic() + 5
    while listening(workers) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not listening(workers), "the port goes with the link"


def test_several_streams_bring_the_same_bytes_and_one_does_where_they_cannot(monkeypatch):
    monkeypatch.setattr(staging, "STREAM_BYTES", 100)
    links = WeightLinks("127.0.0.1", 0)
    try:
        trainer = Trainer(offers=links.offers, streams=4)
        workers = [Worker("x", links), Worker("y", links)]
        requests = []
        answer = links.offers.answer
        links.offers.answer = lambda connection, request: (
            requests.append((request["start"], request["stop"])),
            answer(connection, request),
        )
        trainer.make()
        assert trainer.push_weights(workers) == 2 * WHOLE
        assert sorted(set(requests)) == [(WHOLE * i // 4, WHOLE * (i + 1) // 4) for i in range(4)]
        assert len(requests) == 8
        trainer.make(5)
        assert trainer.push_weights(workers) == 2 * ONE and len(requests) == 8, (
            "too few for more than one"
        )
        links.offers.answer = hang_up
        trainer.newest = None  # everything again
        trainer.make()
        trainer.push_weights(workers)
        assert not any(worker.link.can_fetch for worker in workers)
    finally:
        links.close()


def test_a_range_of_parts_is_what_lies_there():
    parts = [memoryview(bytes(range(start, stop))) for start, stop in ((0, 3), (3, 4), (4, 9))]
    for start in range(10):
        for stop in range(start, 10):
            actual = b"".join(part.tobytes() for part in cut(parts, start, stop))
            assert actual == bytes(range(start, stop))
