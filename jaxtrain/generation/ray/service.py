"""RolloutService: the Producer of a run in a process of its own, which may outlive its trainer.

    trainer ── attach(token, settings) ──> a Producer of its own: prompts, slots, queue, filters
            ── restore(state, held) ─────> goes on from what the trainer settled
            ── take(count) ──────────────> slots, played by the crew
            ── mark_done(slots) ─────────> the cursor, which the trainer's checkpoint keeps
            ── tick(table) ──────────────> the servers' newest state; the lease is good again

One trainer at a time: who attaches holds a lease that each of its calls renews. While it is good,
others are refused with the holder's name; once it has run out, the next takes over and what was
drawn for the first is thrown away, since its weights are another run's. Nothing is trained twice
for that: only what a trainer marked done is done.
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
from jaxtrain.generation.ray.wire import pack_error, pack_slot, unpack_ask, unpack_slot
from jaxtrain.generation.ray.worker_pool import RolloutWorkers


@dataclass
class TrainerStatus:
    """What the producer asks of the trainer's side, as of its last call."""

    progress: float = 0.0
    rounds_begun: int = 0
    producer: Any = None


@dataclass
class TrainerAttachment:
    """What one trainer has here."""

    token: str
    who: str
    """For people: host, process and folder of the run."""
    producer: Producer
    crew: RolloutWorkers
    facts: TrainerStatus
    said: list[str]
    stop: threading.Event = field(default_factory=threading.Event)


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
        self._held: TrainerAttachment | None = None
        self._expires = 0.0
        self._lock = threading.Lock()

    def attach(self, token: str, who: str, opener: str, settings: dict[str, Any]) -> dict[str, Any]:
        """Serve this trainer; UserError while another holds the lease.

        opener: "package.module:function" of (settings["service"], crew, facts, say) -> Producer.
        settings["worker"]: (opener, settings) of the workers.
        """
        with self._lock:
            held = self._held
            if held is not None and held.token != token and self.clock() < self._expires:
                return refuse(
                    UserError(
                        f"the rollout service is held by {held.who}; end that run first, or wait"
                        f" {self.lease_seconds:g} s after its end (rollout.ray.lease_seconds)"
                    )
                )
            self._drop()
            said: list[str] = []
            try:
                # Every attachment is another one for the workers, too.
                key = f"{token}-{time.monotonic_ns()}"
                crew = RolloutWorkers(
                    self.find_workers(),
                    key,
                    *settings["worker"],
                    episode_seconds=self.episode_seconds,
                    log=said.append,
                )
                facts = TrainerStatus()
                make = EntryPoint("opener", opener, "").load()
                producer = make(settings["service"], crew, facts, said.append)
                facts.producer = producer
                held = self._held = TrainerAttachment(token, who, producer, crew, facts, said)
                producer.stop_when(held.stop.is_set)
                producer.wait(crew.open())
            except Exception as error:  # whatever it is, the trainer must hear it
                self._drop()
                return refuse(error)
            self._expires = self.clock() + self.lease_seconds
        return self._answer(held)

    def restore(
        self, token: str, state: dict[str, Any] | None, held: Sequence[dict]
    ) -> dict[str, Any]:
        """Go on from a cursor (None: the start); `held`: prompts that the trainer has and did not
        mark done yet."""

        def work(mine: TrainerAttachment) -> dict[str, Any]:
            if state is not None:
                mine.producer.restore(state)
            mine.producer.prompts.hold([unpack_ask(ask) for ask in held])
            return {}

        return self._do(token, work)

    def take(
        self, token: str, count: int, asking: int, facts: dict[str, Any], table: tuple[int, Any]
    ) -> dict[str, Any]:
        """{"slots"}: see Producer.next_slots; Interrupted after `interrupt`."""

        def work(mine: TrainerAttachment) -> dict[str, Any]:
            mine.stop.clear()
            mine.facts.progress = facts["progress"]
            mine.facts.rounds_begun = facts["rounds_begun"]
            mine.producer.wait(told(mine.crew, table))
            slots = mine.producer.next_slots(count, asking)
            return {"slots": [pack_slot(slot) for slot in slots]}

        return self._do(token, work)

    def mark_done(self, token: str, slots: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """See Producer.mark_done; the slots are slim ones."""

        def work(mine: TrainerAttachment) -> dict[str, Any]:
            mine.producer.mark_done([unpack_slot(slot) for slot in slots])
            return {"state": mine.producer.state()}

        return self._do(token, work)

    def tick(self, token: str, table: tuple[int, Any] | None) -> dict[str, Any]:
        """The lease is renewed; a table of servers, where they have changed, goes to the workers.
        {"reports"}: what the trainer's engine must hear."""

        def work(mine: TrainerAttachment) -> dict[str, Any]:
            if table is not None:
                mine.producer.tell(partial(mine.crew.use, table))
            reports, mine.crew.reports = mine.crew.reports, []
            return {"reports": reports}

        return self._do(token, work)

    def interrupt(self, token: str) -> dict[str, Any]:
        """Whoever waits in `take` gives up."""
        return self._do(token, lambda mine: mine.stop.set() or {})

    def drop_older(self, token: str, version: int, table: tuple[int, Any]) -> dict[str, Any]:
        """See Producer.drop_older."""

        def work(mine: TrainerAttachment) -> dict[str, Any]:
            mine.producer.wait(told(mine.crew, table))
            mine.producer.drop_older(version)
            return {}

        return self._do(token, work)

    def leave(self, token: str) -> dict[str, Any]:
        """The trainer ends: what is played is given up, the lease is free."""
        with self._lock:
            if self._held is not None and self._held.token == token:
                self._drop()
        return {}

    def status(self) -> dict[str, Any]:
        """Who holds it; empty: nobody."""
        held = self._held
        return {} if held is None else {"who": held.who, "left": self._expires - self.clock()}

    def _do(
        self, token: str, work: Callable[[TrainerAttachment], dict[str, Any]]
    ) -> dict[str, Any]:
        held = self._held
        if held is None:  # it was started anew and knows nobody
            return {"gone": True}
        if held.token != token:
            return refuse(RunStopped(f"the rollout service serves another run now: {held.who}"))
        self._expires = self.clock() + self.lease_seconds
        try:
            found = work(held)
        except Exception as error:  # the border: the trainer is told whatever it is
            return refuse(error)
        return {**self._answer(held), **found}

    def _answer(self, held: TrainerAttachment) -> dict[str, Any]:
        said, held.said[:] = held.said[:], []
        prompts, newest = held.producer.prompts, held.producer.player.failures.newest
        return {
            "said": said,
            "done": prompts.done,
            "waiting": prompts.waiting,
            "skipped": getattr(prompts, "skipped", 0),
            "cancelled": dict(getattr(held.producer, "cancelled", {})),
            "newest": None if newest is None else (str(newest), newest.cause),
            "counters": dict(held.crew.counters),
        }

    def _drop(self) -> None:
        """End what the last trainer had here."""
        held, self._held = self._held, None
        if held is not None:
            held.stop.set()
            held.producer.close()


async def told(crew: RolloutWorkers, table: tuple[int, Any]) -> None:
    """Before anything is drawn with an older one."""
    crew.use(table)


def refuse(error: BaseException) -> dict[str, Any]:
    """What a method answers instead of raising."""
    return {"error": pack_error(error)}
