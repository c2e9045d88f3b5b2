"""Acceptance of a draft's guesses: cycles of speculative decoding, by length."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np


@dataclass
class Acceptance:
    """Counts of cycles of speculative decoding by length: 1 + the guesses accepted in it, so 1 to
    `num_drafted` + 1. A guess behind the end of an answer counts as not accepted."""

    num_drafted: int
    histogram: np.ndarray = field(init=False)
    """int64: cycles of each length; entry 0 stays 0."""
    tokens: int = 0
    """Handed out in these cycles."""
    seconds: float = 0.0
    """Spent on them."""

    def __post_init__(self) -> None:
        self.histogram = np.zeros(self.num_drafted + 2, np.int64)

    def add(self, lengths: Iterable[int], tokens: int = 0, seconds: float = 0.0) -> None:
        """Count cycles; a length of 0 is none."""
        counts = np.bincount(np.fromiter(lengths, int), minlength=self.num_drafted + 2)
        counts[0] = 0
        # A new array: another thread may be reading the old one.
        self.histogram = self.histogram + counts
        self.tokens += tokens
        self.seconds += seconds

    def since(self, earlier: "Acceptance | None") -> "Acceptance":
        """A copy of what was counted since a copy was taken; of all without one."""
        difference = Acceptance(self.num_drafted)
        difference.histogram, difference.tokens, difference.seconds = (
            self.histogram,
            self.tokens,
            self.seconds,
        )
        if earlier is not None:
            difference.histogram = difference.histogram - earlier.histogram
            difference.tokens -= earlier.tokens
            difference.seconds -= earlier.seconds
        return difference

    @property
    def cycles(self) -> int:
        return int(self.histogram.sum())

    @property
    def accepted(self) -> int:
        """Guesses accepted; `cycles * num_drafted` were made."""
        return int(self.histogram @ np.maximum(np.arange(self.num_drafted + 2) - 1, 0))

    @property
    def mean(self) -> float:
        """Mean length, tau: tokens for each pass of the target; 0 before the first cycle."""
        return 1 + self.accepted / self.cycles if self.cycles else 0.0

    @property
    def by_position(self) -> list[float]:
        """Share of the cycles in which guess 1, 2, ... was accepted, and so all before it."""
        reached = self.histogram[::-1].cumsum()[::-1][2:]
        return (reached / max(self.cycles, 1)).tolist()

    def metrics(self) -> dict[str, float]:
        """For a run's numbers; none where there was no cycle."""
        if not self.cycles:
            return {}
        metrics = {
            "draft/tau": self.mean,
            "draft/acceptance": self.accepted / (self.cycles * self.num_drafted),
            "draft/cycles": float(self.cycles),
        }
        if self.seconds:
            metrics["draft/tokens_per_second"] = self.tokens / self.seconds
        return metrics
