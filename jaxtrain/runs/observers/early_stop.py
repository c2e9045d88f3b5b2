"""Early stopping: a run ends where a held-out number no longer becomes better."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator

from jaxtrain.config.base import Section
from jaxtrain.runs.observers.protocol import ObservedRun, Verdict


class EarlyStopOptions(Section):
    """Its options."""

    metric: str = "eval/loss"
    """Of evaluations; one without it does not count."""
    mode: Literal["min", "max"] = "min"
    """Which is better."""
    patience: int = Field(3, ge=1)
    """Evaluations in a row that were no better than the best one, after which the run ends."""
    min_delta: float = Field(0.0, ge=0)
    """By how much a value must be better to count."""

    @field_validator("metric")
    @classmethod
    def check_metric(cls, metric: str) -> str:
        """Numbers of steps are another observer's."""
        if not metric.startswith("eval/"):
            raise ValueError(
                f'must be a number of evaluations, such as "eval/loss"; found {metric!r}'
            )
        return metric


class EarlyStop:
    """Counts evaluations in a row without a better value of one metric."""

    Section = EarlyStopOptions

    def __init__(self, options: EarlyStopOptions):
        self.options = options
        self.sign = 1.0 if options.mode == "min" else -1.0
        self.best = float("inf")
        self.waited = 0

    def start(self, run: ObservedRun) -> Verdict:
        """Go on from what earlier attempts have seen."""
        self.log = run.log
        for line in run.earlier():
            self.look(line)
        return self.judge()

    def evaluation(self, step: int, values: Mapping[str, float]) -> Verdict:
        """Compare an evaluation with the best one."""
        self.look(values)
        return self.judge()

    def look(self, values: Mapping[str, Any]) -> None:
        """Compare one evaluation's numbers; None and NaN never count as an improvement."""
        if self.options.metric not in values:
            return
        value = values[self.options.metric]
        signed = float("nan") if value is None else self.sign * value
        if signed < self.best - self.options.min_delta:
            self.best, self.waited = signed, 0
        else:
            self.waited += 1

    def judge(self) -> Verdict:
        """Return the verdict that ends the run, if any."""
        if self.waited < self.options.patience:
            return None
        self.log(
            f"{self.options.metric} has not become better than {self.sign * self.best:.6g} in"
            f" {self.waited} evaluations: the run ends here"
        )
        return "stop"
