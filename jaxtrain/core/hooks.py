"""Hooks: the work around training steps that is not part of the loop.

    on_start ─> per round: on_round ─> per batch: on_batch, on_step ─> on_round_trained
                           on_round_end ─> on_end            an error at any point ─> on_error

A run has a list of hooks (core/run.py). Every event goes through the list in order, on every
process; the order decides what happens first after a round: report, evaluate, save, observers.
"""

import math
from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from jaxtrain.batch import Batch
from jaxtrain.core.task import Round

POLL_STEPS = 8
"""Steps between two broadcasts of process 0's clock and observer verdicts: with short steps, a
broadcast after each one would slow down training."""


def is_due(step: int, before: int, every: int | None, times: float, total: int) -> bool:
    """Return whether an event is due within the steps `before` + 1 to `step`. It occurs every
    `every` steps, or `times` times, spread evenly, in a run of `total` steps."""
    # By passed multiples, not by step % every: a round of several steps may jump over one.
    if every and step // every > before // every:
        return True
    # The tiny addend: 3 * (1 / 3) of a run must count as passed at its last step.
    passed = (math.floor(done * times / total + 1e-9) for done in (step, before))
    return next(passed) > next(passed)


class Hook:
    """Reacts to events of a run; does nothing by default."""

    def on_start(self) -> None:
        """Handle the start of training, before the first round is requested."""

    def on_round(self, step: int, round: Round) -> None:
        """Handle a round, or a part of one, that is about to be trained from step `step` on."""

    def on_batch(self, batch: Batch) -> None:
        """Handle a host batch that is about to be trained on."""

    def on_step(self, batch: Batch, output: Any, metrics: dict[str, float]) -> None:
        """Handle a dispatched step. output: its StepOutput, which the devices may still compute.
        metrics: of the round that begins with the batch."""

    def on_round_trained(self) -> None:
        """Handle the end of a round's training: the state is complete, and the cursor of the data
        points behind the round."""

    def on_round_end(self, before: int) -> None:
        """Do what is due after the steps `before` + 1 to the current one."""

    def on_end(self) -> None:
        """Handle the end of training, by the last step or by a stop request."""

    def on_error(self, error: BaseException) -> None:
        """Handle an error that ends training; must not raise."""


class NoObservers:
    """Stands for the observers of a run that has none."""

    def start(self, total_steps: int, start_step: int) -> None:
        """Do nothing; so do all methods."""

    def notify(self, method: str, *args: Any) -> None: ...

    def saved(self, step: int, path: Any) -> None: ...

    def stopped(self, reason: str) -> None: ...


class HookList(Hook):
    """Passes each event to all hooks in order."""

    def __init__(self, hooks: Sequence[Hook]):
        self.hooks = tuple(hooks)

    @override
    def on_start(self) -> None:
        for hook in self.hooks:
            hook.on_start()

    @override
    def on_round(self, step: int, round: Round) -> None:
        for hook in self.hooks:
            hook.on_round(step, round)

    @override
    def on_batch(self, batch: Batch) -> None:
        for hook in self.hooks:
            hook.on_batch(batch)

    @override
    def on_step(self, batch: Batch, output: Any, metrics: dict[str, float]) -> None:
        for hook in self.hooks:
            hook.on_step(batch, output, metrics)

    @override
    def on_round_trained(self) -> None:
        for hook in self.hooks:
            hook.on_round_trained()

    @override
    def on_round_end(self, before: int) -> None:
        for hook in self.hooks:
            hook.on_round_end(before)

    @override
    def on_end(self) -> None:
        for hook in self.hooks:
            hook.on_end()

    @override
    def on_error(self, error: BaseException) -> None:
        for hook in self.hooks:
            hook.on_error(error)
