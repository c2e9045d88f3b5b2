"""Answers to one prompt and what is known of them: the common form of all preference data.

Rows of datasets become `Ranked`, whatever their columns; a method makes a tree of it: the prompt is
the trunk, each answer a branch.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class RankedAnswer(NamedTuple):
    """One continuation of the prompt."""

    tokens: np.ndarray
    """int32 [n] token ids behind the prompt, n >= 1, with the end of the turn."""
    weights: np.ndarray
    """float32 [n]: 1 where the assistant speaks, 0 on what stands between its turns."""


class RankedPair(NamedTuple):
    """Two answers of which one is better."""

    chosen: int
    """Index of the better answer."""
    rejected: int
    margin: float = 0.0
    """By how much, where the data say so; 0 otherwise."""


@dataclass(frozen=True, eq=False)
class Ranked:
    """A prompt with its answers. Some data compare them (pairs), others judge each (labels)."""

    prompt: np.ndarray
    """int32 [n] token ids, n >= 1, up to where the answer begins."""
    answers: tuple[RankedAnswer, ...]
    pairs: tuple[RankedPair, ...] = ()
    labels: tuple[bool, ...] = ()
    """Whether each answer is desirable; one an answer, or none."""
    origin: str = ""
    """Where it came from, for messages."""
    controls: int = 0
    """Control tokens that its texts spell: see control.py."""

    def __post_init__(self) -> None:
        if not len(self.prompt) or not all(len(answer.tokens) for answer in self.answers):
            raise ValueError("a prompt and each of its answers need a token")
        if any(len(answer.tokens) != len(answer.weights) for answer in self.answers):
            raise ValueError("a weight for each token of an answer")
        if self.labels and len(self.labels) != len(self.answers):
            raise ValueError(f"{len(self.labels)} labels for {len(self.answers)} answers")
        for pair in self.pairs:
            if not {pair.chosen, pair.rejected} <= set(range(len(self.answers))):
                raise ValueError(f"{pair} names no answer of {len(self.answers)}")
