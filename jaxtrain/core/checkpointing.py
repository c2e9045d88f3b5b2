"""When the state is saved, and what is saved of it when a run ends by an error.

A state belongs to a cursor: what had been trained when it was whole. Every save takes both from the
same end of a round, so that what was drawn since then, and not trained, is asked again.

    on_round_trained: mark ─> on_round_end: due? ─> save      by steps, by time; on_end: always
                       └─ on_error ─> rescue ─> the last good state, then the error goes on

Of several processes all save, or none: process 0 alone looks at the clock, and an error that only
one of them has seen (distributed/broadcast.py) ends the run without a save, which would wait for
the others.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from typing_extensions import override

from jaxtrain.core.evaluation import EvaluationHook
from jaxtrain.core.hooks import POLL_STEPS, Hook, is_due
from jaxtrain.core.session import Session
from jaxtrain.core.step_metrics import NonFiniteStep
from jaxtrain.core.step_reports import StepReports
from jaxtrain.distributed.broadcast import broadcast, is_shared
from jaxtrain.runs.checkpoint import Checkpoints


class SavePoint(NamedTuple):
    """A moment at which the state was whole."""

    step: int
    cursor: dict[str, Any]


class CheckpointHook(Hook):
    """Save the state on the schedule of section `checkpoint`, at the end, and before an error."""

    def __init__(
        self,
        session: Session,
        checkpoints: Checkpoints,
        evaluation: EvaluationHook,
        reports: StepReports,
    ):
        """evaluation: its numbers may choose the best checkpoint."""
        self.session, self.checkpoints, self.config = session, checkpoints, session.config
        self.evaluation, self.reports = evaluation, reports
        # A bad step is read when the one after it has been marked.
        self.points: deque[SavePoint] = deque(maxlen=3)
        self.tried = session.start
        """Newest step whose state was saved, or could not be written to the disk."""
        self.saved_at = time.monotonic()

    @override
    def on_round_trained(self) -> None:
        if not self.points or self.points[-1].step < self.session.step:
            self.points.append(SavePoint(self.session.step, self.session.rounds.state()))

    @override
    def on_round_end(self, before: int) -> None:
        # The last state is saved by `on_end`.
        if self.session.step < self.session.rounds.total_steps and self.is_due(before):
            self.save()

    @override
    def on_end(self) -> None:
        if self.session.step > self.session.start:
            self.save()

    @override
    def on_error(self, error: BaseException) -> None:
        with self.session.phase("saving what was trained"):
            self.rescue(error)

    def is_due(self, before: int) -> bool:
        """Return whether to save after the steps `before` + 1 to the current one; the same on all
        processes."""
        step, options = self.session.step, self.config.checkpoint
        if step == before:
            return False
        times = (options.per_epoch or 0) * (self.config.run.num_epochs or 0)
        total = self.session.rounds.total_steps
        return is_due(step, before, options.every, times, total) or self.is_time()

    def is_time(self) -> bool:
        """Return whether checkpoint.every_minutes have passed since a save, on process 0's
        clock."""
        minutes = self.config.checkpoint.every_minutes
        if minutes is None:
            return False

        def passed() -> bool:
            return time.monotonic() - self.saved_at >= 60 * minutes

        if jax.process_count() == 1:
            return passed()
        polls = self.session.rounds.pauses or self.session.step % POLL_STEPS == 0
        return polls and broadcast("whether it is time for a checkpoint", passed)

    def save(self) -> None:
        """Save the current state together with the cursor of the data."""
        if (self.config.checkpoint.best_metric or "").startswith("eval/"):
            # The best checkpoint is chosen by the numbers of its own step.
            self.evaluation.collect(wait=True)
        # Never save a state whose loss is not finite: this raises NonFiniteStep instead.
        self.reports.flush()
        with self.session.phase("saving a checkpoint"):
            self.on_round_trained()
            self.write(self.points[-1], self.reports.latest)
            self.saved_at = time.monotonic()
        self.reports.restart_clock()

    def write(self, point: SavePoint, metrics: dict[str, float]) -> None:
        """Save the current state as that of a point; `metrics` were measured of it."""
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

    def rescue(self, error: BaseException) -> None:
        """Save what was trained before an error that ends the run, if that can be done.

        Never raises, so that the error itself is the one that people see.
        """
        if not is_shared(error) or self.session.step == self.session.start:
            return
        log, latest = self.reports.sinks.log, self.reports.latest
        try:
            step = find_last_good(error, self.reports.flush, self.session.step)
            if step > self.tried:
                self.write(self.find_point(step), latest)
                self.checkpoints.wait()
                log(f"step {step} is saved; the same command goes on from there")
        except Exception as second:  # the border: devices, disk or data may be what has failed
            first = str(second).strip().partition("\n")[0][:300]
            log(f"warning: what was trained since step {self.tried} could not be saved: {first}")

    def find_point(self, step: int) -> SavePoint:
        """Return the cursor of the state after this step. Within a round, the remainder of the
        round is given up: it is not trained again."""
        for point in self.points:
            if point.step == step:
                return point
        self.session.rounds.finish(self.session, interrupted=True)
        return SavePoint(step, self.session.rounds.state())


def find_last_good(error: BaseException, read: Callable[[], None], step: int) -> int:
    """Return the last step with a finite loss; the state is still the one after it."""
    try:
        if isinstance(error, NonFiniteStep):
            raise error
        read()
    except NonFiniteStep as bad:
        return bad.step - 1
    return step
