"""Answers to one prompt with their comparisons or labels: the common form of all preference data.

Rows of datasets become `Ranked`, whatever their columns. A method builds a tree from it: the prompt
is the trunk, each answer a branch.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from jaxtrain.data.packing.tree import PlacedImages

Pairing = Literal["best_worst", "best_rest", "neighbors", "all"]


class RankedAnswer(NamedTuple):
    """Continuation of the prompt."""

    tokens: np.ndarray
    """int32 [n] token ids after the prompt, n >= 1, including the end of the turn."""
    weights: np.ndarray
    """float32 [n]: 1 on assistant tokens, 0 on those between its turns."""
    images: PlacedImages | None = None
    """Images that stand in the answer."""


class RankedPair(NamedTuple):
    """Comparison of two answers."""

    chosen: int
    """Index of the better answer."""
    rejected: int
    margin: float = 0.0
    """Margin of the better answer if the data have it, else 0."""


@dataclass(frozen=True, eq=False)
class Ranked:
    """A prompt with its answers, which are compared (pairs) or judged one by one (labels)."""

    prompt: np.ndarray
    """int32 [n] token ids before the answers, n >= 1."""
    answers: tuple[RankedAnswer, ...]
    pairs: tuple[RankedPair, ...] = ()
    labels: tuple[bool, ...] = ()
    """True for desirable answers; one per answer, or empty."""
    origin: str = ""
    """File and row, for messages."""
    controls: int = 0
    """Control tokens that its texts spell: see control_tokens.py."""
    images: PlacedImages | None = None
    """Images that stand in the prompt."""

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
    """Return pairs whose first answer has the higher score, and a reason for each missing pair.

    Equal scores give no pair. Of several best answers the first counts, of several worst ones the
    last. An answer whose score is None is in no pair.
    """
    scored = [i for i, score in enumerate(scores) if score is not None]
    left_out = ["answer without a score"] * (len(scores) - len(scored))
    ranked = sorted(scored, key=lambda i: -scores[i])  # type: ignore[operator]
    if len(ranked) < 2:
        return [], [*left_out, "fewer than two answers with a score"]
    if pairing == "best_worst":
        compared = [(ranked[0], ranked[-1])]
    elif pairing == "best_rest":
        compared = [(ranked[0], worse) for worse in ranked[1:]]
    elif pairing == "neighbors":
        compared = list(itertools.pairwise(ranked))
    else:
        compared = list(itertools.combinations(ranked, 2))
    pairs = [RankedPair(i, j) for i, j in compared if scores[i] != scores[j]]
    return pairs, [*left_out, *["equal scores"] * (len(compared) - len(pairs))]
