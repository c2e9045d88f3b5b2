"""The samples of one conversation as trees: what several begin with is computed once.

A chat template that rewrites history shows a turn one way when it is spoken and another way later.
Each turn trains on what the model saw when it spoke, so a conversation gives several sequences,
which begin alike. Merged they are a tree of the same loss: every trained token keeps its weight,
and each branch sees its own tokens alone (docs/tree_training.md).
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from jaxtrain.data.packing.prefixes import FlatSequence, merge_prefixes
from jaxtrain.data.packing.tree import Tree
from jaxtrain.data.sample import Dropped, Sample


def share_prefixes(
    results: Sequence[Sample | Dropped], max_tokens: int
) -> list[Sample | Tree | Dropped]:
    """What a row became, its samples merged into trees of at most `max_tokens` tokens each.

    Samples that do not fit into one tree together go on in a next one, so that none is lost; one
    that shares nothing stays a sample.
    """
    samples = [item for item in results if isinstance(item, Sample)]
    dropped = [item for item in results if isinstance(item, Dropped)]
    made: list[Sample | Tree | Dropped] = []
    for group in group_samples(samples, max_tokens):
        if len(group) == 1:
            made += group
            continue
        branches = [FlatSequence(one.tokens, {"nll": one.weights}) for one in group]
        [tree] = merge_prefixes(branches, origin=group[0].origin)
        made.append(replace(tree, controls=sum(one.controls for one in group)))
    return [*made, *dropped]


def group_samples(samples: Sequence[Sample], max_tokens: int) -> list[list[Sample]]:
    """Samples that become one tree together, in their order; first come, first served."""
    groups: list[list[Sample]] = []
    size = 0
    for sample in samples:
        others = groups[-1] if groups else []
        shared = max((common_length(sample.tokens, one.tokens) for one in others), default=0)
        new = len(sample.tokens) - shared
        if shared == 0 or size + new > max_tokens:
            groups.append([])
            new, size = len(sample.tokens), 0
        groups[-1].append(sample)
        size += new
    return groups


def common_length(left: np.ndarray, right: np.ndarray) -> int:
    """Tokens that two sequences have in common at their beginning."""
    n = min(len(left), len(right))
    differs = left[:n] != right[:n]
    return int(differs.argmax()) if differs.any() else n
