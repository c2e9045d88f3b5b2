"""Versions on their way to hosts: sent once to each, by what it lacks, whoever fails meanwhile."""

import contextlib
import socket
import threading
import time

import numpy as np
import pytest

from jaxtrain.hf.ops import Piece, whole
from jaxtrain.rollout.vllm.control import Deadline, ServerGone
from jaxtrain.rollout.vllm.image import Image
from jaxtrain.rollout.vllm.staging import KEPT_DELTAS, Edition, Staging
from jaxtrain.rollout.vllm.weight_links import Link
from jaxtrain_vllm import shelf as shelves
from jaxtrain_vllm import wire
from jaxtrain_vllm.shelf import WeightShelf

SHAPES = {"a": (64, 8), "b": (40,)}
WHOLE = (64 * 8 + 40) * 4
ONE = 4 + 4
"""Bytes of one change in a large tensor: its place and its value."""


class Worker:
    """A shelf at the other end of a link, on a host of that name."""

    def __init__(self, host: str):
        self.shelf, self.host, self.link = WeightShelf(), host, None
        self.connect()

    def connect(self) -> None:
        if self.link is not None:
            self.link.close()
        serves = self.shelf.begin("token")
        with socket.create_server(("127.0.0.1", 0)) as listener:
            there = socket.create_connection(listener.getsockname())
            here, _ = listener.accept()
        self.there = there
        threading.Thread(target=self.shelf.listen, args=(there,), daemon=True).start()
        self.link = Link(here, {"serves": serves})
        self.link.host, self.link.own_host = self.host, "trainer"

    def commit(self, edition: Edition) -> None:
        self.shelf.commit(edition.version, lambda tensors: None)
        self.link.held = (edition.version, edition.checksum)


class Trainer:
    """Params, the image of them, and what was counted of a publish."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.params = {n: rng.normal(size=s).astype(np.float32) for n, s in SHAPES.items()}
        self.image, self.newest = Image(SHAPES, "float32"), None
        self.counted: dict[str, float] = {}
        self.staging = Staging(self.count)

    def count(self, name: str, number: float) -> None:
        self.counted[name] = self.counted.get(name, 0.0) + number

    def make(self, *changed: int) -> Edition:
        """The next version; these items of "a" are changed in it, or it is the first."""
        for place in changed:
            self.params["a"].reshape(-1)[place] += 1.0
        pieces = [Piece(n, a.shape, whole(a.shape), a) for n, a in self.params.items()]
        last = self.newest
        changes = self.image.take(pieces, compare=last is not None)
        checksum = wire.checksum(self.image.tensors)
        version, base = (0, -1) if last is None else (last.version + 1, last.version)
        self.image.segment.seal(version, checksum)
        self.newest = Edition(version, self.image.tensors, checksum, changes, base)
        self.staging.history.add(last, self.newest)
        return self.newest

    def bring(self, workers: list[Worker], seconds: float = 10.0) -> float:
        """Stage the newest on all of them at once, as so many servers, and commit; bytes sent."""
        self.counted.clear()
        edition, errors = self.newest, []

        def one(worker: Worker) -> None:
            try:
                own = self.image.segment
                self.staging.stage([worker.link], edition, own, Deadline(seconds))
            except ServerGone as error:
                errors.append(error)

        threads = [threading.Thread(target=one, args=(worker,)) for worker in workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        for worker in workers:
            worker.commit(edition)
            for name, array in self.params.items():
                kept = worker.shelf.tensors[name].bits.view(np.float32)
                np.testing.assert_array_equal(kept, array.ravel())
        return self.counted["sync/tcp_bytes"]


def test_a_host_is_sent_a_version_once_whatever_runs_there():
    trainer = Trainer()
    workers = [Worker(host) for host in ("x", "x", "x", "y")]
    trainer.make()
    assert trainer.bring(workers) == 2 * WHOLE
    assert trainer.counted["sync/bytes"] == 4 * WHOLE
    for place in (3, 200):
        trainer.make(place)
        assert trainer.bring(workers[::-1]) == 2 * ONE, "who was sent the last is sent the delta"


def test_workers_of_one_server_are_sent_it_side_by_side():
    trainer, workers = Trainer(), [Worker(host) for host in "xyz"]
    edition = trainer.make()
    meeting = threading.Barrier(3, timeout=10)
    for worker in workers:
        answer = worker.shelf.answer

        def together(header, payload, answer=answer):
            meeting.wait()
            return answer(header, payload)

        worker.shelf.answer = together
    links = [worker.link for worker in workers]
    trainer.staging.stage(links, edition, trainer.image.segment, Deadline(10))
    for worker in workers:
        worker.commit(edition)


def test_who_cannot_read_anothers_memory_is_sent_its_own(monkeypatch):
    trainer, workers = Trainer(), [Worker("x"), Worker("x")]

    def refuse(described):
        raise PermissionError("another user")

    monkeypatch.setattr(shelves.Segment, "attach", refuse)
    trainer.make()
    assert trainer.bring(workers) == 2 * WHOLE
    trainer.make(7)
    assert trainer.bring(workers) == 2 * ONE
    assert sum(worker.link.shares for worker in workers) == 1, "one was sent it and never asked"


def test_another_takes_over_where_the_one_that_was_sent_it_is_gone():
    trainer, workers = Trainer(), [Worker("x") for _ in range(3)]
    trainer.make()
    trainer.bring(workers)
    owner = trainer.staging._hosts["x"].owner
    gone = next(worker for worker in workers if worker.link is owner)
    gone.there.close()
    owner.close()
    left = [worker for worker in workers if worker is not gone]
    trainer.make(5)
    started = time.monotonic()
    assert trainer.bring(left) == WHOLE, "the others had no base of their own"
    assert time.monotonic() - started < 5
    trainer.make(6)
    assert trainer.bring(left) == ONE


def test_a_worker_that_hangs_holds_up_its_host_no_longer_than_it_may():
    trainer, workers, over = Trainer(), [Worker("x"), Worker("x")], threading.Event()
    trainer.make()
    for worker in workers:
        worker.shelf.answer = lambda header, payload: over.wait(10) and {}
    started = time.monotonic()
    with pytest.raises(ServerGone, match=r"took longer|in time"):
        trainer.bring(workers, seconds=0.3)
    assert time.monotonic() - started < 3
    over.set()


def test_who_missed_some_versions_is_sent_all_their_changes_at_once():
    trainer, away, here = Trainer(), Worker("x"), Worker("y")
    trainer.make()
    trainer.bring([away, here])
    for place in (1, 2, 2, 300):
        trainer.make(place)
        trainer.bring([here])
    away.connect()  # the process is the same, the link is new
    assert away.link.held == (0, away.shelf.checksum)
    assert trainer.bring([away]) == 3 * ONE and trainer.counted["sync/chains"] == 1
    trainer.make(9)
    assert trainer.bring([away, here]) == 2 * ONE


def test_a_chain_ends_where_it_is_too_long_or_another_trainer_begins():
    trainer, away, here = Trainer(), Worker("x"), Worker("y")
    trainer.make()
    trainer.bring([away, here])
    for place in range(KEPT_DELTAS + 1):
        trainer.make(place)
        trainer.bring([here])
    assert trainer.bring([away]) == WHOLE
    assert away.shelf.begin("token") == [KEPT_DELTAS + 1, away.shelf.checksum]
    assert away.shelf.begin("of another trainer") is None and away.shelf.version == -1
    with contextlib.suppress(OSError):
        away.there.close()
