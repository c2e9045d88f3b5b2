"""What became of a draft's guesses: cycles by how many of them were accepted."""

from collections.abc import Iterable
from typing import Any

import numpy as np


class Acceptance:
    """Counts of cycles of speculative decoding by length: 1 + the guesses accepted in it, so 1 to
    `num_drafted` + 1. A guess behind the end of an answer counts as not accepted."""

    def __init__(self, num_drafted: int, lengths: Iterable[int] = ()):
        self.num_drafted = num_drafted
        self.histogram = np.zeros(num_drafted + 2, np.int64)
        """Cycles of each length; entry 0 stays 0."""
        self.add(lengths)

    def add(self, lengths: Iterable[int]) -> None:
        """Count cycles; a length of 0 is none."""
        found = np.bincount(np.fromiter(lengths, int), minlength=self.num_drafted + 2)
        found[0] = 0
        self.histogram += found

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

    def since(self, histogram: np.ndarray) -> "Acceptance":
        """What was counted after `histogram` was."""
        found = Acceptance(self.num_drafted)
        found.histogram = self.histogram - histogram
        return found

    def table(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "tau": self.mean,
            "cycles": self.cycles,
            "drafted": self.cycles * self.num_drafted,
            "accepted": self.accepted,
            "accepted_by_position": self.by_position,
            "histogram": self.histogram[1:].tolist(),
        }
