"""Early stopping: a run ends where a held-out number no longer becomes better."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path


class EarlyStop:
    """Counts evaluations in a row without a better value of one metric."""

    def __init__(self, metric: str, mode: str, patience: int, min_delta: float = 0.0):
        """mode: "min" or "max", whichever is better. min_delta: by how much a value must be better
        than the best one before it counts."""
        self.metric, self.patience, self.min_delta = metric, patience, min_delta
        self.sign = 1.0 if mode == "min" else -1.0
        self.best = float("inf")
        self.waited = 0

    def look(self, values: Mapping[str, float]) -> None:
        """One evaluation's numbers; one without the metric does not count."""
        value = values.get(self.metric)
        if value is None:
            return
        if self.sign * value < self.best - self.min_delta:
            self.best, self.waited = self.sign * value, 0
        else:
            self.waited += 1

    @property
    def reached(self) -> bool:
        """Whether the run ends here."""
        return self.waited >= self.patience

    def describe(self) -> str:
        """Why it ends, for people."""
        return (
            f"{self.metric} has not become better than {self.sign * self.best:.6g} in"
            f" {self.waited} evaluations (eval.patience): the run ends here"
        )


def read_values(path: Path, metric: str) -> Iterable[float]:
    """What a metrics.jsonl says of one metric, for a run that goes on."""
    if not path.exists():
        return
    with path.open(encoding="utf-8") as file:
        for line in file:
            try:
                value = json.loads(line).get(metric)
            except (ValueError, AttributeError):  # the end of a file that a crash cut off
                continue
            if isinstance(value, int | float):
                yield float(value)
