"""Scores of several answers to one prompt, ranked into pairs."""

import itertools
from collections.abc import Sequence
from typing import Literal

from jaxtrain.data.comparisons.ranked import RankedPair

Pairing = Literal["best_worst", "best_rest", "neighbors", "all"]


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
