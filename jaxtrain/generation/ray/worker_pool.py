"""Crew: the service's episode workers, and the player that has prompts played by them.

RemotePlayer.draw(ask) ─> the worker with the fewest prompts ──> episodes, rewards
     ^                        │
     │   lost: EpisodeFailed("worker lost"), another worker plays the prompt (rollout.retries)
     └────────────────────────┘
beat, every BEAT seconds and whenever the table of servers changes ──> reports, counters
     no answer for episode_seconds: the process is ended; whoever keeps it starts another
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from jaxtrain.generation.engine import EpisodeFailed, PromptRequest, Sampling
from jaxtrain.generation.producer import Drawn, GroupPlayer, RoundSlot
from jaxtrain.generation.ray.remote import RemoteLost, RemoteObject, ask
from jaxtrain.generation.ray.wire import pack_ask, unpack, unpack_failure

BEAT = 5.0


class WorkerHandle:
    """One worker as the service sees it."""

    def __init__(self, far: RemoteObject, name: str):
        self.far, self.name = far, name
        self.load = 0
        self.there = True
        """Whether its last call was answered."""
        self.opening = asyncio.Lock()
        self.counted: dict[str, float] = {}
        """Its counters when it last told them."""


class RolloutWorkers:
    """The workers of one attached trainer. Used by one event loop."""

    def __init__(
        self,
        workers: Sequence[RemoteObject],
        key: str,
        opener: str,
        settings: dict[str, Any],
        *,
        episode_seconds: float,
        log: Callable[[str], None],
    ):
        """key: of this attachment. opener, settings: see EpisodeWorker.open."""
        self.members = [WorkerHandle(far, f"worker {i}") for i, far in enumerate(workers)]
        self.key, self.opener, self.settings = key, opener, settings
        self.episode_seconds, self.log = episode_seconds, log
        self.table: tuple[int, Any] = (-1, None)
        """Of servers, with the number that grows with every change."""
        self.counters: Counter[str] = Counter()
        self.reports: list[Any] = []
        """What the trainer's engine has not heard yet."""
        self.late: list[Any] = []
        """Failures in prompts that were given up, which their player has not counted yet."""
        self._slots: dict[int, RoundSlot] = {}
        """Of the prompts under way."""
        self._changed: list[asyncio.Event] = []
        self._beats: list[asyncio.Task] = []
        self._numbers = itertools.count()

    def use(self, table: tuple[int, Any]) -> None:
        """The servers changed: all workers are told, none is waited for. An older table is late."""
        if table[0] <= self.table[0]:
            return
        self.table = table
        for event in self._changed:
            event.set()

    def begin(self) -> None:
        """Look after the workers from now on."""
        if not self._beats:
            for member in self.members:
                event = asyncio.Event()
                self._changed.append(event)
                self._beats.append(asyncio.ensure_future(self._watch(member, event)))

    async def open(self) -> None:
        """Have all workers opened, as far as they are there; raises what that raised."""
        found = await asyncio.gather(*map(self._open, self.members), return_exceptions=True)
        for error in found:
            if isinstance(error, BaseException) and not isinstance(error, RemoteLost):
                raise error

    async def draw(
        self, prompt: PromptRequest, sampling: Sampling, slot: RoundSlot
    ) -> dict[str, Any]:
        """A worker's reply to one prompt; Lost where the worker went."""
        self.begin()
        member = min(self.members, key=lambda one: (not one.there, one.load))
        member.load += 1
        number = next(self._numbers)
        self._slots[number] = slot
        arguments = (self.key, number, pack_ask(prompt), sampling.model_dump(), self.table)
        try:
            while True:
                reply = await ask(member.far, "draw", *arguments)
                member.there = True
                if "closed" not in reply:
                    self._hear(member, reply.get("report", {}))
                    return reply
                await self._open(member)
        except RemoteLost:
            if member.there:
                self.counters["ray/workers_lost"] += 1
                self.log(f"{member.name} was lost; its prompts are played elsewhere")
            member.there = False
            raise
        except asyncio.CancelledError:
            member.far.call("cancel", number)
            raise
        finally:
            del self._slots[number]
            member.load -= 1

    async def close(self) -> None:
        """Leave the workers, which give up what they play."""
        for task in self._beats:
            task.cancel()
        self._beats, self._changed = [], []
        closing = [ask(one.far, "close", seconds=5.0) for one in self.members if one.there]
        await asyncio.gather(*closing, return_exceptions=True)

    async def _open(self, member: WorkerHandle) -> None:
        async with member.opening:
            member.counted = {}
            await ask(member.far, "open", self.key, self.opener, self.settings)
            member.there = True

    async def _watch(self, member: WorkerHandle, changed: asyncio.Event) -> None:
        while True:
            changed.clear()
            call = ask(member.far, "beat", self.key, self.table, seconds=self.episode_seconds)
            try:
                self._hear(member, await call)
                member.there = True
            except TimeoutError:
                member.there = False
                self.counters["ray/workers_hung"] += 1
                self.log(
                    f"{member.name} did not answer for {self.episode_seconds:g} s"
                    " (rollout.ray.episode_seconds): it is started again, its prompts are asked"
                    " again"
                )
                member.far.end()
            except RemoteLost:
                member.there = False
            try:
                await asyncio.wait_for(changed.wait(), BEAT)
            except TimeoutError:
                pass

    def _hear(self, member: WorkerHandle, reply: dict[str, Any]) -> None:
        self.reports += reply.get("reports", [])
        self.late += reply.get("late", [])
        for number, oldest in reply.get("ages", {}).items():
            if oldest is not None and number in self._slots:
                self._slots[number].ages.replace(oldest)
        for name, count in reply.get("counters", {}).items():
            # Less than before: an answer that a later one has overtaken. Where a worker is opened
            # anew, `_open` has forgotten what it had counted.
            before = member.counted.get(name, 0.0)
            self.counters[name] += max(count - before, 0)
            member.counted[name] = max(count, before)


class RemotePlayer(GroupPlayer):
    """A GroupPlayer whose episodes are played by a crew."""

    def __init__(self, crew: RolloutWorkers, *arguments: Any, **options: Any):
        """The rest as GroupPlayer, without environment, engine and rewards."""
        super().__init__(None, crew, None, *arguments, **options)  # type: ignore[arg-type]
        self.crew = crew

    async def draw(self, ask: PromptRequest, slot: RoundSlot, sampling: Sampling) -> Drawn | None:
        """See GroupPlayer; lost workers are failures like others."""
        failure = EpisodeFailed("worker lost", cause="an episode worker was lost", pause=True)
        for attempt in range(self.rules.retries + 1):
            slot.redone += self.rules.group_size if attempt else 0
            try:
                reply = await self.crew.draw(ask, sampling, slot)
            except RemoteLost:
                await asyncio.sleep(min(1.0, attempt))
                continue
            if "cancelled" in reply:  # the worker was opened anew meanwhile
                continue
            return self._take(reply, slot)
        return self._give_up(failure, slot)

    def _take(self, reply: dict[str, Any], slot: RoundSlot) -> Drawn | None:
        slot.dropped.update(reply["dropped"])
        slot.redone += reply["redone"]
        for told in reply["told"]:
            self.failures.tell(unpack_failure(told))
        late, self.crew.late = self.crew.late, []
        for failure, count in [*late, *reply["added"]]:
            self.failures.add(None if failure is None else unpack_failure(failure), count)
        drawn = unpack(reply["drawn"])
        return None if drawn is None else (drawn[0], drawn[1])
