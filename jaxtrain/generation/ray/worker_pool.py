"""The service's episode workers, and the player that plays prompts with them.

RemotePlayer.draw(request) ─> the worker with the fewest prompts ──> episodes, rewards
     ^                        │
     │   lost: EpisodeFailed("worker lost"), another worker plays the prompt (rollout.retries)
     └────────────────────────┘
beat, every BEAT seconds and whenever the table of servers changes ──> reports, counters
     no answer for episode_seconds: the process is ended; its supervisor starts another
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from typing_extensions import override

from jaxtrain.generation.engine import EpisodeFailed, PromptRequest, Sampling
from jaxtrain.generation.episodes import RoundSlot
from jaxtrain.generation.group_player import DrawnGroup, GroupPlayer
from jaxtrain.generation.ray.remote import RemoteLost, RemoteObject, call
from jaxtrain.generation.ray.wire import pack_request, unpack, unpack_failure

BEAT = 5.0


class WorkerHandle:
    """A worker as the service sees it."""

    def __init__(self, remote: RemoteObject, name: str):
        self.remote, self.name = remote, name
        self.load = 0
        self.answers = True
        """True if its last call was answered."""
        self.opening = asyncio.Lock()
        self.counted: dict[str, float] = {}
        """Its counters as of its last report."""


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
        """key: names this attachment. opener, settings: see EpisodeWorker.open."""
        self.members = [WorkerHandle(remote, f"worker {i}") for i, remote in enumerate(workers)]
        self.key, self.opener, self.settings = key, opener, settings
        self.episode_seconds, self.log = episode_seconds, log
        self.table: tuple[int, Any] = (-1, None)
        """State of the servers, with a number that grows with every change."""
        self.counters: Counter[str] = Counter()
        self.reports: list[Any] = []
        """Reports that the trainer has not fetched yet."""
        self.late: list[Any] = []
        """Failures in prompts that were given up, which the player has not counted yet."""
        self._slots: dict[int, RoundSlot] = {}
        """Slots of the prompts under way, by their number."""
        self._changed: list[asyncio.Event] = []
        self._beats: list[asyncio.Task] = []
        self._numbers = itertools.count()

    def use(self, table: tuple[int, Any]) -> None:
        """Send the servers' new state to all workers without waiting; ignore an older table."""
        if table[0] <= self.table[0]:
            return
        self.table = table
        for event in self._changed:
            event.set()

    def begin(self) -> None:
        """Begin to watch the workers."""
        if not self._beats:
            for member in self.members:
                event = asyncio.Event()
                self._changed.append(event)
                self._beats.append(asyncio.ensure_future(self._watch(member, event)))

    async def open(self) -> None:
        """Open all workers that answer; raises what opening one raised."""
        errors = await asyncio.gather(*map(self._open, self.members), return_exceptions=True)
        for error in errors:
            if isinstance(error, BaseException) and not isinstance(error, RemoteLost):
                raise error

    async def draw(
        self, prompt: PromptRequest, sampling: Sampling, slot: RoundSlot
    ) -> dict[str, Any]:
        """Return a worker's reply to one prompt; raises RemoteLost if the worker was lost."""
        self.begin()
        member = min(self.members, key=lambda member: (not member.answers, member.load))
        member.load += 1
        number = next(self._numbers)
        self._slots[number] = slot
        arguments = (self.key, number, pack_request(prompt), sampling.model_dump(), self.table)
        try:
            while True:
                reply = await call(member.remote, "draw", *arguments)
                member.answers = True
                if "closed" not in reply:
                    self._take_report(member, reply.get("report", {}))
                    return reply
                await self._open(member)
        except RemoteLost:
            if member.answers:  # several of its prompts are lost at once: count it once
                self.counters["ray/workers_lost"] += 1
                self.log(f"{member.name} was lost; its prompts are played elsewhere")
            member.answers = False
            raise
        except asyncio.CancelledError:
            member.remote.call("cancel", number)
            raise
        finally:
            del self._slots[number]
            member.load -= 1

    async def close(self) -> None:
        """Leave the workers, which stop what they play."""
        for task in self._beats:
            task.cancel()
        self._beats, self._changed = [], []
        closing = [call(m.remote, "close", seconds=5.0) for m in self.members if m.answers]
        await asyncio.gather(*closing, return_exceptions=True)

    async def _open(self, member: WorkerHandle) -> None:
        async with member.opening:
            member.counted = {}
            await call(member.remote, "open", self.key, self.opener, self.settings)
            member.answers = True

    async def _watch(self, member: WorkerHandle, changed: asyncio.Event) -> None:
        while True:
            changed.clear()
            beat = call(member.remote, "beat", self.key, self.table, seconds=self.episode_seconds)
            try:
                self._take_report(member, await beat)
                member.answers = True
            except TimeoutError:
                member.answers = False
                self.counters["ray/workers_hung"] += 1
                self.log(
                    f"{member.name} did not answer for {self.episode_seconds:g} s"
                    " (rollout.ray.episode_seconds): it is started again, its prompts are asked"
                    " again"
                )
                member.remote.end()
            except RemoteLost:
                member.answers = False
            try:
                await asyncio.wait_for(changed.wait(), BEAT)
            except TimeoutError:
                pass

    def _take_report(self, member: WorkerHandle, reply: dict[str, Any]) -> None:
        self.reports += reply.get("reports", [])
        self.late += reply.get("late", [])
        for number, oldest in reply.get("ages", {}).items():
            if oldest is not None and number in self._slots:
                self._slots[number].tracker.replace(oldest)
        for name, count in reply.get("counters", {}).items():
            # A lower count is an old reply that a later one has overtaken. When a worker is opened
            # again it counts from 0, and `_open` has cleared `counted`.
            before = member.counted.get(name, 0.0)
            self.counters[name] += max(count - before, 0)
            member.counted[name] = max(count, before)


class RemotePlayer(GroupPlayer):
    """A GroupPlayer whose episodes are played by workers."""

    def __init__(self, workers: RolloutWorkers, *arguments: Any, **options: Any):
        """arguments, options: those of GroupPlayer behind environments and engine."""
        super().__init__(None, workers, *arguments, **options)  # type: ignore[arg-type]
        self.workers = workers

    @override
    async def draw(
        self, request: PromptRequest, slot: RoundSlot, sampling: Sampling
    ) -> DrawnGroup | None:
        failure = EpisodeFailed("worker lost", cause="an episode worker was lost", pause=True)
        for attempt in range(self.rules.retries + 1):
            slot.redone += self.rules.group_size if attempt else 0
            try:
                reply = await self.workers.draw(request, sampling, slot)
            except RemoteLost:
                await asyncio.sleep(min(1.0, attempt))
                continue
            if "cancelled" in reply:  # the worker was closed and opened again meanwhile
                continue
            return self._take(reply, slot)
        return self._give_up(failure, slot)

    def _take(self, reply: dict[str, Any], slot: RoundSlot) -> DrawnGroup | None:
        slot.dropped.update(reply["dropped"])
        slot.redone += reply["redone"]
        for failure in reply["told"]:
            self.failures.log_once(unpack_failure(failure))
        late, self.workers.late = self.workers.late, []
        for failure, count in [*late, *reply["added"]]:
            self.failures.add(None if failure is None else unpack_failure(failure), count)
        drawn = unpack(reply["drawn"])
        return None if drawn is None else (drawn[0], drawn[1])
