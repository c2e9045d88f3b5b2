"""From prompts to groups: asyncio slots that play prompts ahead of the trainer.

    prompts ─> slot ─┐  GroupPlayer.play, zero-       finished groups           the loop
    prompts ─> slot ─┼─ advantage filter, refill  ──> (at most `ahead` more ──> next_slots(n)
    prompts ─> slot ─┘                                than were requested)

A slot is a place in a round: it gives one group, or the reason why there is none. Slots are started
by next_slots() alone, and never more than were requested so far plus `ahead`; that bound is the
bounded queue. With ahead = 0 a round is drawn after the last one was trained; with ahead = one
round while it is trained (lag 1); with ahead = max_lag rounds and ordered=False all the time.

Which slots leave first: the first ones started, or, unordered, those with the oldest tokens
(earliest deadline first), then the first ones started. Those that leave together are in the order
in which they were started. If the lag is bounded, a group that is played
with tokens that no later round may train is cancelled as soon as that is known, and its prompt is
played again in the same slot by whatever weights the engine holds: the newest, since `drop_older`
is called after they were published.

Slots are played in an event loop with a thread of its own (event_loop.py).
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from jaxtrain.errors import RunStopped
from jaxtrain.generation.engine import PromptRequest
from jaxtrain.generation.episodes import Group, RoundSlot
from jaxtrain.generation.event_loop import EventLoop
from jaxtrain.generation.group_player import GroupPlayer
from jaxtrain.generation.prompts import PromptOrder
from jaxtrain.generation.reward_table import is_worthless
from jaxtrain.generation.version_tracker import VersionTracker

T = TypeVar("T")

MAX_TRIES = 3
"""Times that a prompt is played in a slot whose episodes become too old while they are played."""


@dataclass(frozen=True)
class ProducerOptions:
    """Number and order of slots that are played ahead of the trainer."""

    ahead: int = 0
    """Slots beyond those that were requested."""
    ordered: bool = True
    """Slots leave in the order in which they were started, not by the age of their tokens."""
    streaming: bool = False
    """Despite `ordered`, slots leave as they finish, though never before they are requested."""
    patience: float | None = None
    """Seconds that the event loop may be blocked; None: without limit."""


class Producer:
    """Producer of slots ahead of the trainer; the module's docstring has the rules."""

    def __init__(
        self,
        prompts: PromptOrder,
        player: GroupPlayer,
        options: ProducerOptions = ProducerOptions(),
        *,
        take_retry: Callable[[], bool] = lambda: False,
        log: Callable[[str], None] = print,
    ):
        """take_retry: returns True if the next prompt may be one that waits for a second try."""
        self.prompts, self.player, self.rules = prompts, player, player.rules
        self.options, self.take_retry = options, take_retry
        self._requested = self._started = self._taken = 0
        self._running: dict[asyncio.Task, int] = {}
        """Number of the slot that each task fills."""
        self._playing: dict[asyncio.Task, RoundSlot] = {}
        """Slot of each task that plays a group, and may be cancelled by itself."""
        self._oldest = 0
        """Version of the oldest tokens that can still be trained."""
        self.cancelled: Counter[str] = Counter()
        """Groups given up while they were played, by reason, since the start."""
        self._finished: dict[int, RoundSlot] = {}
        self._loop = EventLoop("rollouts", options.patience, log)

    def stop_when(self, should_stop: Callable[[], bool]) -> None:
        """Stop waiting for slots once `should_stop` returns True; it is polled."""
        self._loop.should_stop = should_stop

    def next_slots(self, count: int, requesting: int | None = None) -> list[RoundSlot]:
        """Wait for the next `count` slots and return them; they are not done until `mark_done`.

        requesting: places that this call requests, if not `count`: all of a round when its first
        slots are taken, none when the others are.
        Raises errors that end the run: those of the engine, RunStopped or UserError for too many
        failures, and Interrupted once the run should stop.
        """
        return self._loop.run(self._take(count, count if requesting is None else requesting))

    def mark_done(self, slots: Sequence[RoundSlot]) -> None:
        """Mark slots that were taken as done: passed to the trainer, or dropped and counted."""
        for slot in slots:
            groups = [*slot.flat, *([slot.group] if slot.group not in (None, *slot.flat) else [])]
            for request in slot.requests:
                worthless = any(g.draw == request.draw and is_worthless(g) for g in slot.flat)
                self.prompts.mark_done(request, again=worthless)
                for group in groups:
                    if group.draw == request.draw and not group.episodes[0].given:
                        self.prompts.learn(request, self.player.totals(group))

    def drop_older(self, version: int) -> None:
        """Cancel groups with tokens from before that version, now or as soon as that is known: no
        later round takes them. Their prompts are played again."""
        # In the event loop's thread, which owns the tasks.
        self._loop.call_soon(lambda: self._drop_older(version))

    def describe(self) -> str:
        """Return how many groups are still played; from any thread."""
        return f"{len(self._playing)} groups to come"

    def state(self) -> dict[str, Any]:
        """Return the cursor: slots marked done stay done, all others will be played again."""
        return self.prompts.state()

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a cursor; before the first next_slots()."""
        assert not self._started, "restore() comes before next_slots()"
        self.prompts.restore(state)

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what a coroutine returns that runs in the event loop of the episodes."""
        return self._loop.run(work)

    def call_soon(self, work: Callable[[], Any]) -> None:
        """Call a function in that event loop soon, without waiting for it."""
        self._loop.call_soon(work)

    def close(self) -> None:
        """Cancel the episodes in progress and stop the thread."""
        self._loop.close(self._cancel)

    async def _take(self, count: int, requesting: int) -> list[RoundSlot]:
        # A whole round at once: all its slots are played while the first ones are taken.
        self._requested += requesting
        assert self._taken + count <= self._requested, "taken before it was requested"
        while self._started < self._requested + self.options.ahead:
            task = asyncio.get_running_loop().create_task(self._fill())
            self._running[task] = self._started
            self._started += 1
        slots: dict[int, RoundSlot] = {}
        while len(slots) < count:
            while len(slots) < count and (popped := self._pop()) is not None:
                slots.update([popped])
            if len(slots) < count:
                await self._progress()
        # Groups are packed in this order, and sums depend on it: a round of the same groups must
        # train to the same bits, whichever of them finished first.
        return [slots[number] for number in sorted(slots)]

    def _pop(self) -> tuple[int, RoundSlot] | None:
        """Return the number of a finished slot that is due, and the slot: the first, or the one
        with the oldest tokens."""
        if not self._finished:
            return None
        age = self._finished.__getitem__
        ordered, streaming = self.options.ordered, self.options.streaming
        number = min(self._finished, key=lambda n: (0 if ordered else age(n).min_version, n))
        # A later round's slot must not leave early even if it has finished: which prompts a round
        # trains would then depend on timing, and a resumed run would not repeat it.
        if ordered and number >= (self._requested if streaming else self._taken + 1):
            return None
        self._taken += 1
        return number, self._finished.pop(number)

    async def _progress(self) -> None:
        """Wait until a slot is filled; raise the error of a slot that failed."""
        if not self._running:
            raise RunStopped("the rollout producer has no slot left to wait for")
        done, _ = await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
        # `done` is a set: in the order of the slots, the same failure ends the run every time.
        for task in sorted(done, key=self._running.__getitem__):
            number = self._running.pop(task)
            self._finished[number] = task.result()

    async def _fill(self) -> RoundSlot:
        """Play prompts until a group is kept, or max_prompts of them gave none."""
        slot = RoundSlot(None, [])
        while len(slot.requests) < self.rules.max_prompts:
            request = self.prompts.next(again=self.take_retry())
            slot.requests.append(request)
            group = await self._play(request, slot)
            if group is None:
                continue
            if self.player.is_flat(group):
                slot.flat.append(group)
                # Equal rewards give no gradient: try another prompt in this slot.
                if self.rules.drop_flat:
                    slot.dropped["zero_advantage"] += 1
                    continue
            slot.group = group
            break
        return slot

    async def _play(self, request: PromptRequest, slot: RoundSlot) -> Group | None:
        """Return the group of a prompt, played again if its episodes became too old; None if there
        is none, for a reason that the slot counts."""
        for _ in range(MAX_TRIES):
            # A new tracker for every try: reports of the cancelled one's requests, which may still
            # arrive, must not make the new one look old.
            slot.tracker = VersionTracker()
            # A task of its own, so that it can be cancelled without cancelling the slot.
            task = asyncio.ensure_future(self.player.play(request, slot))
            self._playing[task] = slot
            slot.tracker.on_change = partial(self._drop_if_older, task, slot.tracker)
            try:
                return await task
            except asyncio.CancelledError:
                # Two cancellations look alike here. _drop_if_older takes the task out of _playing
                # before it is awaited; if the slot itself was cancelled (the run ends), possibly in
                # the same turn of the event loop, `cancelling` counts that, and it must go on.
                slot_task = asyncio.current_task()
                if task in self._playing or (slot_task is not None and slot_task.cancelling()):
                    raise
            finally:
                self._playing.pop(task, None)
        slot.dropped["stale"] += 1
        return None

    def _drop_older(self, version: int) -> None:
        self._oldest = version
        for task, slot in list(self._playing.items()):
            self._drop_if_older(task, slot.tracker)

    def _drop_if_older(self, task: asyncio.Task, tracker: VersionTracker) -> None:
        # Without a known version nothing is given up: an answer that has not begun will be drawn by
        # the newest weights.
        oldest = self._oldest if tracker.oldest is None else tracker.oldest
        # cancel() returns False for a task that has just finished: its group then leaves by the
        # round's own age check.
        if task in self._playing and oldest < self._oldest and task.cancel():
            del self._playing[task]
            self.cancelled["stale"] += 1

    async def _cancel(self) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        self._running.clear()
        # In this loop, and after the episodes: connections belong to it, and requests that are
        # still under way would fail their episodes instead of being cancelled.
        await self.player.engine.close()
