"""Numbers of steps on their way to sinks and observers, one step late.

    on_step(n) ── dispatched ──> pending; now read step n - 1 ──> sinks, observers, watchdog
    flush() ── reads the pending step: before anything that must not follow a bad step

A step's numbers are read only after the next step was dispatched, so that the devices never wait
for the host. Every reader of a step may raise NonFiniteStep.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
from typing_extensions import override

from jaxtrain.batch import Batch
from jaxtrain.core.hooks import Hook
from jaxtrain.core.session import Session
from jaxtrain.core.step_metrics import (
    ExpertOverflowWarning,
    PendingStep,
    StepReader,
    ZeroGradientWarning,
)
from jaxtrain.core.task import Round
from jaxtrain.runs.sinks import Sinks
from jaxtrain.runs.watchdog import Watchdog


class StepReports(Hook):
    """Reads dispatched steps and writes all numbers of a run."""

    def __init__(self, session: Session, sinks: Sinks, watchdog: Watchdog, observers: Any):
        """observers: runs.observers.dispatch.Observers, or NoObservers."""
        self.session, self.log_every = session, session.config.log.every
        self.sinks, self.watchdog, self.observers = sinks, watchdog, observers
        self.reader = StepReader(session)
        self.checks = ExpertOverflowWarning(), ZeroGradientWarning()
        self.pending: PendingStep | None = None
        self.programs: set[tuple[Any, ...]] = set()
        """(rows, tokens, whether a single microstep) that this process has compiled a step for."""
        self.compiles = False
        """Whether the step of the current batch compiles first."""
        self.latest: dict[str, float] = {}
        """Newest numbers of the current state: what a checkpoint is judged by."""
        self.newest: dict[str, dict[str, float]] = {}
        """Per policy its newest numbers since the last line."""
        self.round_metrics: dict[str, float] = {}
        """Numbers about rounds that wait for the next line."""

    @override
    def on_round(self, step: int, round: Round) -> None:
        self.sinks.sampled(step, round.samples)

    @override
    def on_batch(self, batch: Batch) -> None:
        microsteps, rows, tokens = batch.tokens.shape
        single = microsteps == 1 and not self.session.task.varying_microsteps
        self.compiles = (rows, tokens, single) not in self.programs
        if self.compiles:
            # Compiling may take minutes: report the step before it first.
            self.flush()
            self.programs.add((rows, tokens, single))
            if self.session.compiled_ahead:
                return
            last = max(len(self.programs), len(self.session.row_lengths))
            self.sinks.log(
                f"compiling step program {len(self.programs)} of {last}: {rows} rows of {tokens}"
                " tokens"
            )

    @override
    def on_step(self, batch: Batch, output: Any, metrics: dict[str, float]) -> None:
        session, previous = self.session, self.pending
        # Streams that were made on devices may be large: a pending step must not keep them alive.
        streams = {n: v for n, v in batch.streams.items() if not isinstance(v, jax.Array)}
        self.pending = PendingStep(
            session.step,
            output,
            batch._replace(streams=streams),
            session.rounds.counters(),
            metrics,
            session.policy,
            session.updates[session.policy],
            self.compiles,
        )
        if previous is not None:
            self.read(previous)

    def flush(self) -> None:
        """Read and report the step that is still pending; raises NonFiniteStep if it is bad."""
        pending, self.pending = self.pending, None
        if pending is not None:
            self.read(pending)

    def read(self, pending: PendingStep) -> None:
        """Read and report a step; raises NonFiniteStep."""
        # With several policies a line has the newest numbers of each since the line before.
        self.newest[pending.policy] = step_values = self.reader.read(pending)
        self.latest = {name: x for values in self.newest.values() for name, x in values.items()}
        for check in self.checks:
            if (warning := check.check(step_values)) is not None:
                self.sinks.log(warning)
        self.watchdog.beat(pending.step)
        self.round_metrics |= pending.round
        efficiency = pending.counters["packing_efficiency"]
        counters = {**pending.counters.get("metrics", {}), "packing_efficiency": efficiency}
        self.observers.notify("step", pending.step, {**step_values, **pending.round, **counters})
        last = pending.step == self.session.rounds.total_steps
        if pending.step % self.log_every == 0 or last:
            values = {**self.latest, **self.round_metrics, **counters}
            self.round_metrics, self.newest = {}, {}
            self.sinks.write(pending.step, values)

    def write(self, step: int, numbers: dict[str, float]) -> None:
        """Write numbers that no step's line has on a line of their own, behind the step's."""
        if numbers:
            self.flush()
            self.sinks.write(step, numbers)

    def write_evaluation(self, step: int, numbers: dict[str, float]) -> None:
        """Write numbers of the weights after `step`, which may be an earlier step."""
        if step == self.session.step:
            self.latest = {**self.latest, **numbers}
        self.sinks.write(step, numbers)
        self.observers.notify("evaluation", step, numbers)

    def write_samples(self, step: int, lines: Iterable[Mapping[str, Any]]) -> None:
        """Write answers of an evaluation."""
        lines = list(lines)
        self.sinks.sampled(step, lines)
        if lines:
            self.observers.notify("samples", step, lines)

    def restart_clock(self) -> None:
        """Time the next step from now on: what came before was no training."""
        self.reader.restart()
