"""Answers to one prompt and what is known of them: the common form of all preference data.

Rows of datasets become `Ranked`, whatever their columns; a method makes a tree of it: the prompt is
the trunk, each answer a branch.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

Pairing = Literal["best_worst", "best_rest", "neighbors", "all"]


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


def rank_pairs(
    scores: Sequence[float | None], pairing: Pairing
) -> tuple[list[RankedPair], list[str]]:
    """Pairs of which the first has the higher score, and a reason for each that there is not.

    Equal scores give no pair; of several that are best (or worst) the first (the last) counts. An
    answer whose score is None is in no pair.
    """
    known = [i for i, score in enumerate(scores) if score is not None]
    left_out = ["answer without a score"] * (len(scores) - len(known))
    ranked = sorted(known, key=lambda i: -scores[i])  # type: ignore[operator]
    if len(ranked) < 2:
        return [], [*left_out, "fewer than two answers with a score"]
    if pairing == "best_worst":
        compared = [(ranked[0], ranked[-1])]
    elif pairing == "best_rest":
        compared = [(ranked[0], other) for other in ranked[1:]]
    elif pairing == "neighbors":
        compared = list(itertools.pairwise(ranked))
    else:
        compared = list(itertools.combinations(ranked, 2))
    pairs = [RankedPair(i, j) for i, j in compared if scores[i] != scores[j]]
    return pairs, [*left_out, *["equal scores"] * (len(compared) - len(pairs))]
