"""Rollout service: the Producer of a run in a process of its own, which may outlive its trainer.

    trainer ── attach(token, settings) ──> a Producer of its own: prompts, slots, queue, filters
            ── restore(state, requests) ─> continues from what the trainer marked done
            ── take(count) ──────────────> slots, played by the workers
            ── mark_done(slots) ─────────> the cursor, which the trainer's checkpoint keeps
            ── tick(table) ──────────────> the servers' newest state; the lease is renewed

One trainer at a time: a trainer that attaches has a lease, which each of its calls renews. While it
is valid, others are refused with the name of the trainer that has it; once it has run out, the next
takes over, and what was drawn for the first is thrown away, since its weights are another run's.
Nothing is trained twice: only what a trainer marked done is done.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import EntryPoint
from typing import Any

from jaxtrain.errors import RunStopped, UserError
from jaxtrain.generation.producer import Producer
from jaxtrain.generation.ray.remote import RemoteObject
from jaxtrain.generation.ray.wire import pack_error, pack_slot, unpack_request, unpack_slot
from jaxtrain.generation.ray.worker_pool import RolloutWorkers


@dataclass
class TrainerStatus:
    """Facts of the trainer that the producer needs, as of its last call."""

    progress: float = 0.0
    rounds_begun: int = 0
    producer: Any = None


@dataclass
class TrainerAttachment:
    """Everything that the service has for one trainer."""

    token: str
    trainer: str
    """For people: host, process and folder of the run."""
    producer: Producer
    workers: RolloutWorkers
    facts: TrainerStatus
    lines: list[str]
    """Log lines that the trainer has not fetched yet."""
    stop: threading.Event = field(default_factory=threading.Event)
    num_answers: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while an answer is numbered and its numbers are read."""


class RolloutService:
    """Called from several threads at once, one of which may wait in `take`. Every method answers
    {"error": ...} instead of raising."""

    def __init__(
        self,
        find_workers: Callable[[], Sequence[RemoteObject]],
        *,
        lease_seconds: float = 60.0,
        episode_seconds: float = 300.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.find_workers, self.clock = find_workers, clock
        self.lease_seconds, self.episode_seconds = lease_seconds, episode_seconds
        self._attached: TrainerAttachment | None = None
        self._expires = 0.0
        self._lock = threading.Lock()

    def attach(
        self, token: str, trainer: str, opener: str, settings: dict[str, Any]
    ) -> dict[str, Any]:
        """Serve this trainer; UserError while another one has the lease.

        opener: "package.module:function" of (settings["service"], workers, facts, log) -> Producer.
        settings["worker"]: (opener, settings) of the workers.
        """
        with self._lock:
            attached = self._attached
            taken = attached is not None and attached.token != token
            if attached is not None and taken and self.clock() < self._expires:
                return refuse(
                    UserError(
                        f"the rollout service is held by {attached.trainer}; end that run first, or"
                        f" wait {self.lease_seconds:g} s after its end (rollout.ray.lease_seconds)"
                    )
                )
            self._drop()
            lines: list[str] = []
            try:
                # A trainer that attaches again has lost its last service, and with it what workers
                # were playing: they must be opened again, too.
                key = f"{token}-{time.monotonic_ns()}"
                workers = RolloutWorkers(
                    self.find_workers(),
                    key,
                    *settings["worker"],
                    episode_seconds=self.episode_seconds,
                    log=lines.append,
                )
                facts = TrainerStatus()
                make = EntryPoint("opener", opener, "").load()
                producer = make(settings["service"], workers, facts, lines.append)
                facts.producer = producer
                attached = TrainerAttachment(token, trainer, producer, workers, facts, lines)
                self._attached = attached
                producer.stop_when(attached.stop.is_set)
                producer.wait(workers.open())
            except Exception as error:  # the border: the trainer raises whatever it is
                self._drop()
                return refuse(error)
            self._expires = self.clock() + self.lease_seconds
        return self._answer(attached)

    def restore(
        self, token: str, state: dict[str, Any] | None, requests: Sequence[dict]
    ) -> dict[str, Any]:
        """Continue from a cursor (None: the start). requests: prompts that the trainer has and did
        not mark done yet."""

        def work(attached: TrainerAttachment) -> dict[str, Any]:
            if state is not None:
                attached.producer.restore(state)
            attached.producer.prompts.reserve([unpack_request(request) for request in requests])
            return {}

        return self._do(token, work)

    def take(
        self, token: str, count: int, requesting: int, facts: dict[str, Any], table: tuple[int, Any]
    ) -> dict[str, Any]:
        """Return {"slots"} of Producer.next_slots; Interrupted after `interrupt`."""

        def work(attached: TrainerAttachment) -> dict[str, Any]:
            attached.stop.clear()
            attached.facts.progress = facts["progress"]
            attached.facts.rounds_begun = facts["rounds_begun"]
            attached.producer.wait(use_table(attached.workers, table))
            slots = attached.producer.next_slots(count, requesting)
            return {"slots": [pack_slot(slot) for slot in slots]}

        return self._do(token, work)

    def mark_done(self, token: str, slots: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Mark slots as done, which hold what `wire.slim` leaves; returns the cursor."""

        def work(attached: TrainerAttachment) -> dict[str, Any]:
            attached.producer.mark_done([unpack_slot(slot) for slot in slots])
            return {"state": attached.producer.state()}

        return self._do(token, work)

    def tick(self, token: str, table: tuple[int, Any] | None) -> dict[str, Any]:
        """Renew the lease; a table of servers, if they have changed, goes to the workers. Returns
        {"reports"}: what the trainer's engine must learn."""

        def work(attached: TrainerAttachment) -> dict[str, Any]:
            if table is not None:
                attached.producer.call_soon(partial(attached.workers.use, table))
            reports, attached.workers.reports = attached.workers.reports, []
            return {"reports": reports}

        return self._do(token, work)

    def interrupt(self, token: str) -> dict[str, Any]:
        """Stop the call that waits in `take`."""
        return self._do(token, lambda attached: attached.stop.set() or {})

    def drop_older(self, token: str, version: int, table: tuple[int, Any]) -> dict[str, Any]:
        """Cancel groups with older tokens, see Producer.drop_older."""

        def work(attached: TrainerAttachment) -> dict[str, Any]:
            attached.producer.wait(use_table(attached.workers, table))
            attached.producer.drop_older(version)
            return {}

        return self._do(token, work)

    def leave(self, token: str) -> dict[str, Any]:
        """End the trainer's lease, and cancel what is played for it."""
        with self._lock:
            if self._attached is not None and self._attached.token == token:
                self._drop()
        return {}

    def status(self) -> dict[str, Any]:
        """Return the attached trainer and the seconds of its lease; empty without one."""
        attached = self._attached
        if attached is None:
            return {}
        return {"who": attached.trainer, "left": self._expires - self.clock()}

    def _do(
        self, token: str, work: Callable[[TrainerAttachment], dict[str, Any]]
    ) -> dict[str, Any]:
        attached = self._attached
        if attached is None:  # it was started again, and no trainer has attached since
            return {"gone": True}
        if attached.token != token:
            trainer = attached.trainer
            return refuse(RunStopped(f"the rollout service serves another run now: {trainer}"))
        self._expires = self.clock() + self.lease_seconds
        try:
            reply = work(attached)
        except Exception as error:  # the border: the trainer raises whatever it is
            return refuse(error)
        return {**self._answer(attached), **reply}

    def _answer(self, attached: TrainerAttachment) -> dict[str, Any]:
        producer = attached.producer
        # Several calls are answered at once, and the trainer may read the answers in another order:
        # the number says which of them is newer.
        with attached.lock:
            attached.num_answers += 1
            lines, attached.lines[:] = attached.lines[:], []
            prompts, newest = producer.prompts, producer.player.failures.newest
            return {
                "number": attached.num_answers,
                "said": lines,
                "done": prompts.done,
                "waiting": prompts.waiting,
                "skipped": getattr(prompts, "skipped", 0),
                "cancelled": dict(getattr(producer, "cancelled", {})),
                "newest": None if newest is None else (str(newest), newest.cause),
                "counters": dict(attached.workers.counters),
            }

    def _drop(self) -> None:
        """End what the last trainer had."""
        attached, self._attached = self._attached, None
        if attached is not None:
            attached.stop.set()
            attached.producer.close()


async def use_table(workers: RolloutWorkers, table: tuple[int, Any]) -> None:
    """Take a table in the event loop of the workers, before anything is drawn with an older one."""
    workers.use(table)


def refuse(error: BaseException) -> dict[str, Any]:
    """Return what a method answers instead of raising."""
    return {"error": pack_error(error)}
