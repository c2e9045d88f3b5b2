"""Versions on their way to hosts: sent once to each, by what it lacks, whoever fails meanwhile."""

import contextlib
import threading
import time

import pytest
from staged_hosts import ONE, WHOLE, Trainer, Worker

from jaxtrain.generation.vllm.control import Deadline, ServerGone
from jaxtrain.generation.weight_sync.staging import MAX_DELTAS
from jaxtrain_vllm import weight_receiver as shelves


def test_a_host_is_sent_a_version_once_whatever_runs_there():
    trainer = Trainer()
    workers = [Worker(host) for host in ("x", "x", "x", "y")]
    trainer.make()
    assert trainer.push_weights(workers) == 2 * WHOLE
    assert trainer.counted["sync/bytes"] == 4 * WHOLE
    for position in (3, 200):
        trainer.make(position)
        assert trainer.push_weights(workers[::-1]) == 2 * ONE, (
            "who was sent the last is sent the delta"
        )


def test_workers_of_one_server_are_sent_it_side_by_side():
    trainer, workers = Trainer(), [Worker(host) for host in "xyz"]
    weights = trainer.make()
    meeting = threading.Barrier(3, timeout=10)
    for worker in workers:
        answer = worker.shelf.answer

        def together(header, payload, answer=answer):
            meeting.wait()
            return answer(header, payload)

        worker.shelf.answer = together
    links = [worker.link for worker in workers]
    trainer.staging.stage(links, weights, trainer.image.segment, Deadline(10))
    for worker in workers:
        worker.commit(weights)


def test_who_cannot_read_anothers_memory_is_sent_its_own(monkeypatch):
    trainer, workers = Trainer(), [Worker("x"), Worker("x")]

    def refuse(described):
        raise PermissionError("another user")

    monkeypatch.setattr(shelves.SharedMemorySegment, "attach", refuse)
    trainer.make()
    assert trainer.push_weights(workers) == 2 * WHOLE
    trainer.make(7)
    assert trainer.push_weights(workers) == 2 * ONE
    assert sum(worker.link.can_share for worker in workers) == 1, "one was sent it and never asked"


def test_another_takes_over_where_the_one_that_was_sent_it_is_gone():
    trainer, workers = Trainer(), [Worker("x") for _ in range(3)]
    trainer.make()
    trainer.push_weights(workers)
    owner = trainer.staging._hosts["x"].owner
    gone = next(worker for worker in workers if worker.link is owner)
    gone.there.close()
    owner.close()
    remaining = [worker for worker in workers if worker is not gone]
    trainer.make(5)
    started = time.monotonic()
    assert trainer.push_weights(remaining) == WHOLE, "the others had no base of their own"
    assert time.monotonic() - started < 5
    trainer.make(6)
    assert trainer.push_weights(remaining) == ONE


def test_a_worker_that_hangs_holds_up_its_host_no_longer_than_it_may():
    trainer, workers, over = Trainer(), [Worker("x"), Worker("x")], threading.Event()
    trainer.make()
    for worker in workers:
        worker.shelf.answer = lambda header, payload: over.wait(10) and {}
    started = time.monotonic()
    with pytest.raises(ServerGone, match=r"took longer|in time"):
        trainer.push_weights(workers, seconds=0.3)
    assert time.monotonic() - started < 3
    over.set()


def test_who_missed_some_versions_is_sent_all_their_changes_at_once():
    trainer, away, local_result = Trainer(), Worker("x"), Worker("y")
    trainer.make()
    trainer.push_weights([away, local_result])
    for position in (1, 2, 2, 300):
        trainer.make(position)
        trainer.push_weights([local_result])
    away.connect()  # the process is the same, the link is new
    assert away.link.served == (0, away.shelf.checksum)
    assert trainer.push_weights([away]) == 3 * ONE and trainer.counted["sync/chains"] == 1
    trainer.make(9)
    assert trainer.push_weights([away, local_result]) == 2 * ONE


def test_a_chain_ends_where_it_is_too_long_or_another_trainer_begins():
    trainer, away, local_result = Trainer(), Worker("x"), Worker("y")
    trainer.make()
    trainer.push_weights([away, local_result])
    for position in range(MAX_DELTAS + 1):
        trainer.make(position)
        trainer.push_weights([local_result])
    assert trainer.push_weights([away]) == WHOLE
    assert away.shelf.begin("token") == [MAX_DELTAS + 1, away.shelf.checksum]
    assert away.shelf.begin("of another trainer") is None and away.shelf.version == -1
    with contextlib.suppress(OSError):
        away.there.close()
