"""When the state is saved, and what is saved of it when a run ends by an error.

A state belongs to a cursor: what had been trained when it was whole. Every save takes both from the
same end of a round, so that what was drawn since then, and not trained, is asked again.

    round trained ─> mark() ─> due? ─> save()          by steps, by time, at the end, on a signal
                        └─ error ─> rescue() ─> the last good state, then the error goes on

Of several processes all save, or none: process 0 alone looks at the clock, and an error that only
one of them has seen (agree.py) ends the run without a save, which would wait for the others.
"""

import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jaxtrain.core.session import Session
from jaxtrain.distributed.broadcast import broadcast, is_shared, mark_shared
from jaxtrain.errors import RunStopped
from jaxtrain.runs.checkpoint import Checkpoints

LOOK_EVERY = 8
"""Steps between two looks of several processes at process 0's clock, where steps may be short."""


def is_due(step: int, before: int, every: int | None, times: float, total: int) -> bool:
    """Whether something falls on the steps `before` + 1 to `step`: what comes every so many steps,
    or so many times, evenly, in a run of `total` steps."""
    if every and step // every > before // every:
        return True
    passed = (math.floor(done * times / total + 1e-9) for done in (step, before))
    return next(passed) > next(passed)


class NonFiniteStep(RunStopped):
    """A step's loss or gradient was not finite; every process reads that."""

    def __init__(self, text: str, step: int):
        super().__init__(text)
        self.step = step
        """The bad step. The state is that after the step before it."""
        mark_shared(self)


class SavePoint(NamedTuple):
    """A moment at which the state was whole."""

    step: int
    cursor: dict[str, Any]


class Saves:
    """The saves of one run."""

    def __init__(self, session: Session, checkpoints: Checkpoints, log: Callable[[str], None]):
        self.session, self.checkpoints, self.log = session, checkpoints, log
        self.config = session.config
        # A bad step is read when the one after it has been marked.
        self.points: deque[SavePoint] = deque(maxlen=3)
        self.tried = session.start
        """The newest step whose state is saved, or was refused by the disk."""
        self.saved_at = time.monotonic()

    def mark(self) -> None:
        """A round has been trained: the state is whole, and the cursor that of what follows."""
        if not self.points or self.points[-1].step < self.session.step:
            self.points.append(SavePoint(self.session.step, self.session.rounds.state()))

    def due(self, before: int) -> bool:
        """Whether to save after the steps `before` + 1 to the current one; all processes alike."""
        step, options = self.session.step, self.config.checkpoint
        if step == before:
            return False
        times = (options.per_epoch or 0) * (self.config.run.num_epochs or 0)
        total = self.session.rounds.total_steps
        return is_due(step, before, options.every, times, total) or self.is_time()

    def is_time(self) -> bool:
        """Whether checkpoint.every_minutes have passed since a save, on process 0's clock."""
        minutes = self.config.checkpoint.every_minutes
        if minutes is None:
            return False

        def passed() -> bool:
            return time.monotonic() - self.saved_at >= 60 * minutes

        if jax.process_count() == 1:
            return passed()
        looks = self.session.rounds.pauses or self.session.step % LOOK_EVERY == 0
        return looks and broadcast("whether it is time for a checkpoint", passed)

    def save(self, metrics: dict[str, float]) -> None:
        """Save the current state, which is whole and finite; `metrics` are those measured of it."""
        self.mark()
        self.write(self.points[-1], metrics)
        self.saved_at = time.monotonic()

    def write(self, point: SavePoint, metrics: dict[str, float]) -> None:
        """Save the current state as that of a point."""
        # What went wrong with the checkpoint before may not go wrong with this one.
        self.checkpoints.wait()
        self.tried = point.step
        self.checkpoints.save(
            point.step,
            self.session.tree(),
            point.cursor,
            metrics=metrics,
            config=self.config.saved(),
        )

    def rescue(self, error: Exception, read: Callable[[], None], metrics: dict[str, float]) -> None:
        """An error is about to end the run: save what was trained before it, if that can be done.

        Never raises, so that the error is the one that people see. read: reads the numbers of the
        step that was dispatched last; raises NotFinite.
        """
        if not is_shared(error) or self.session.step == self.session.start:
            return
        try:
            step = find_last_good(error, read, self.session.step)
            if step > self.tried:
                self.write(self.find_point(step), metrics)
                self.checkpoints.wait()
                self.log(f"step {step} is saved; the same command goes on from there")
        except Exception as second:  # the border: devices, disk or data may be what has failed
            first = str(second).strip().partition("\n")[0][:300]
            self.log(
                f"warning: what was trained since step {self.tried} could not be saved: {first}"
            )

    def find_point(self, step: int) -> SavePoint:
        """The state after this step with its cursor. Within a round, the rest of it is given up:
        it is not asked again."""
        for point in self.points:
            if point.step == step:
                return point
        self.session.rounds.finish(self.session, interrupted=True)
        return SavePoint(step, self.session.rounds.state())


def find_last_good(error: Exception, read: Callable[[], None], step: int) -> int:
    """The step after which the state was as it is now, and finite."""
    try:
        if isinstance(error, NonFiniteStep):
            raise error
        read()
    except NonFiniteStep as bad:
        return bad.step - 1
    return step
