"""Detection of spikes of a metric over its running median, with a warning, a checkpoint or a stop.
(A non-finite loss ends a run in any case.)"""

import math
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any, Literal

from pydantic import Field

from jaxtrain.config.base import Section
from jaxtrain.runs.observers.protocol import ObservedRun, Verdict

NORMAL = 1.4826
"""Standard deviation of a normal distribution by its median absolute deviation."""
LEAST = 1e-3
"""Smallest assumed deviation, as a share of the median, for metrics that hardly change."""


class LossSpikeOptions(Section):
    """Its options."""

    metric: str = "loss"
    """Of steps; those without it do not count."""
    deviations: float = Field(8.0, gt=0)
    """How far above the median a number is a spike: in standard deviations, which are estimated
    by the median absolute deviation. One that is not finite always is."""
    window: int = Field(64, ge=4, le=100_000)
    """Steps that the median is taken of; spikes are left out."""
    warmup: int = Field(20, ge=4)
    """Numbers that must have been seen before anything counts as a spike."""
    steps: int = Field(3, ge=1)
    """Spikes in a row that it takes."""
    action: Literal["warn", "save", "evaluate", "stop"] = "warn"
    """What then happens, beside a warning."""


class LossSpike:
    """Compares each step's number with the median of those before it, in their own deviation."""

    Section = LossSpikeOptions

    def __init__(self, options: LossSpikeOptions):
        self.options = options
        self.seen: deque[float] = deque(maxlen=options.window)
        self.count = self.high = 0

    def start(self, run: ObservedRun) -> None:
        """The window is that of the steps before."""
        self.alert = run.alert
        for line in run.earlier():
            self.look(line)
        self.high = 0

    def step(self, step: int, values: Mapping[str, float]) -> Verdict:
        """Check the loss of one step."""
        self.look(values)
        if self.high != self.options.steps:  # once for each time that it leaps
            return None
        self.alert(
            f"{self.options.metric} was {values[self.options.metric]:.4g} after step {step}, with a"
            f" median of {median(self.seen):.4g} in the {len(self.seen)} calm steps before"
        )
        return None if self.options.action == "warn" else self.options.action

    def look(self, values: Mapping[str, Any]) -> None:
        """Count a step's number."""
        if self.options.metric not in values:
            return
        value = values[self.options.metric]
        if self.is_spike(value):
            self.high += 1
        else:
            self.high = 0
            if value is not None and math.isfinite(value):
                self.seen.append(float(value))
                self.count += 1

    def is_spike(self, value: float | None) -> bool:
        """Return whether a number is an outlier among those before it."""
        if self.count < self.options.warmup:
            return False
        if value is None or not math.isfinite(value):
            return True
        middle = median(self.seen)
        deviation = NORMAL * median(abs(loss - middle) for loss in self.seen)
        return value > middle + self.options.deviations * max(deviation, LEAST * abs(middle))
