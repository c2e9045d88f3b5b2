"""Prefix merging: groups of flat token sequences as trees of their common prefixes.

Rollouts of one prompt, flat samples of a multi-turn episode, a preference pair: common beginnings
are stored and computed once. Weights stay exact, because a shared token carries the sum of the
weights of its sequences.

A chat template that rewrites history shows a turn one way when it is written and another way later.
Each turn trains on what the model saw when it wrote it, so that a conversation gives several
samples that begin alike. `share_prefixes` merges these: every trained token keeps its weight, and
each branch sees only its own tokens (docs/tree_training.md).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import numpy as np

from jaxtrain.data.packing.tree import Node, PlacedImages, Tree, Weights
from jaxtrain.data.sample import RowNote, Sample


@dataclass(frozen=True, eq=False)
class FlatSequence:
    """Flat sequence to be merged with others."""

    tokens: np.ndarray
    """int32 [n]"""
    weights: Weights
    """{component: float [n]}; every branch of a group has the same components."""
    streams: dict[str, np.ndarray] = field(default_factory=dict)
    """{name: [n]}; shared context takes the values of the first branch."""
    images: PlacedImages | None = None
    """Images that stand in it: tokens of different ones are not shared."""

    @cached_property
    def keys(self) -> np.ndarray:
        """[n]: what has to be equal where sequences share tokens."""
        return token_keys(self.tokens, self.images)


@dataclass(frozen=True)
class Saving:
    """Tokens before and after merging."""

    flat_tokens: int
    """Tokens of all sequences separately."""
    packed_tokens: int
    """Tokens of the trees."""

    @property
    def saved_tokens(self) -> int:
        """Number of tokens that need not be computed."""
        return self.flat_tokens - self.packed_tokens


def merge_prefixes(
    branches: Sequence[FlatSequence], *, share: Literal["all", "context"] = "all", origin: str = ""
) -> list[Tree]:
    """Merge `branches` into trees of their longest common prefixes, one per distinct first token.

    share "all": equal tokens are shared, trained or not, and the weights of a shared token add up;
    exact for sums of per-token losses. "context": a sequence shares nothing from its first trained
    token on, so that every trained token belongs to one branch, as clipped and sequence-level
    objectives need. The k-th end of the trees is the k-th branch, in order of first appearance.
    Raises ValueError for an empty group or sequence, and under "all" for a shared trained token
    whose streams differ.
    """
    if not branches or any(len(branch.tokens) == 0 for branch in branches):
        raise ValueError("cannot merge: a group needs at least one sequence, none of them empty")
    limits = [
        len(b.tokens) if share == "all" else _first_trained(b.weights, len(b.tokens))
        for b in branches
    ]
    trees = []
    for group in _partition(branches, limits, list(range(len(branches))), 0):
        trees.append(_grow(branches, limits, group, origin))
    return trees


def measure_saving(trees: Sequence[Tree]) -> Saving:
    """Measure the tokens of all branches separately against those of the trees."""
    return Saving(
        sum(sum(tree.branch_lengths()) for tree in trees), sum(tree.num_tokens for tree in trees)
    )


def _first_trained(weights: Weights, length: int) -> int:
    trained = np.zeros(length, bool)
    for values in weights.values():
        trained |= np.asarray(values) != 0
    return int(trained.argmax()) if trained.any() else length


def _partition(
    branches: Sequence[FlatSequence], limits: list[int], group: list[int], depth: int
) -> list[list[int]]:
    """Split a group by the token at `depth`; beyond its limit a sequence is alone."""
    by_token: dict[object, list[int]] = {}
    for index in group:
        alone = limits[index] <= depth
        key = ("alone", index) if alone else int(branches[index].keys[depth])
        by_token.setdefault(key, []).append(index)
    return list(by_token.values())


def _common_length(
    branches: Sequence[FlatSequence], limits: list[int], group: list[int], depth: int
) -> int:
    """Return the first depth at which the tokens of the group differ or a sequence ends."""
    first = branches[group[0]].keys
    end = min(min(len(branches[i].tokens), limits[i]) for i in group)
    for index in group[1:]:
        differs = first[depth:end] != branches[index].keys[depth:end]
        if differs.any():
            end = depth + int(differs.argmax())
    return end


def _grow(
    branches: Sequence[FlatSequence], limits: list[int], root: list[int], origin: str
) -> Tree:
    nodes: list[Node] = []
    end_of: dict[int, int] = {}
    stack = [(-1, 0, root)]
    while stack:
        parent, depth, group = stack.pop()
        if len(group) == 1:
            stop = len(branches[group[0]].tokens)
        else:
            stop = _common_length(branches, limits, group, depth)
        nodes.append(_make_node(parent, branches, group, depth, stop))
        for index in group:
            if len(branches[index].tokens) == stop:
                end_of[index] = len(nodes) - 1
        rest = [index for index in group if len(branches[index].tokens) > stop]
        for part in reversed(_partition(branches, limits, rest, stop)):
            stack.append((len(nodes) - 1, stop, part))
    return Tree(tuple(nodes), tuple(end_of[index] for index in sorted(root)), origin)


def _make_node(
    parent: int, branches: Sequence[FlatSequence], group: list[int], start: int, stop: int
) -> Node:
    first = branches[group[0]]
    weights = {
        name: np.sum(
            [np.asarray(branches[i].weights[name][start:stop], np.float64) for i in group], 0
        )
        for name in first.weights
    }
    streams = {name: np.asarray(values)[start:stop] for name, values in first.streams.items()}
    if len(group) > 1 and streams and any(values.any() for values in weights.values()):
        trained = np.any([values != 0 for values in weights.values()], axis=0)
        for name, values in streams.items():
            for index in group[1:]:
                branch_values = np.asarray(branches[index].streams[name])[start:stop]
                if (values != branch_values)[trained].any():
                    raise ValueError(
                        f"stream {name!r} differs on a trained token that two branches share;"
                        ' merge with share="context"'
                    )
    images = first.images.cut(start, stop) if first.images is not None else None
    return Node(parent, first.tokens[start:stop], weights, streams, images=images)


def share_prefixes(
    results: Sequence[Sample | RowNote], max_tokens: int
) -> list[Sample | Tree | RowNote]:
    """Merge the samples of a row into trees of at most `max_tokens` tokens each.

    Samples that do not fit into one tree continue in the next, so that none is lost. A sample that
    shares nothing stays a sample.
    """
    samples = [item for item in results if isinstance(item, Sample)]
    dropped = [item for item in results if isinstance(item, RowNote)]
    merged: list[Sample | Tree | RowNote] = []
    for group in group_samples(samples, max_tokens):
        if len(group) == 1:
            merged += group
            continue
        branches = [
            FlatSequence(sample.tokens, {"nll": sample.weights}, images=sample.images)
            for sample in group
        ]
        [tree] = merge_prefixes(branches, origin=group[0].origin)
        merged.append(replace(tree, controls=sum(sample.controls for sample in group)))
    return [*merged, *dropped]


def group_samples(samples: Sequence[Sample], max_tokens: int) -> list[list[Sample]]:
    """Group consecutive samples that become one tree together."""
    groups: list[list[Sample]] = []
    size = 0
    for sample in samples:
        group = groups[-1] if groups else []
        numbers = token_keys(sample.tokens, sample.images)
        shared = max(
            (common_length(numbers, token_keys(m.tokens, m.images)) for m in group), default=0
        )
        new = len(sample.tokens) - shared
        if shared == 0 or size + new > max_tokens:
            groups.append([])
            new, size = len(sample.tokens), 0
        groups[-1].append(sample)
        size += new
    return groups


def token_keys(tokens: np.ndarray, images: PlacedImages | None) -> np.ndarray:
    """Return numbers [n] that are equal where sequences may share tokens: the tokens, but another
    number for each feature of an image, because different images have the same tokens."""
    return tokens if images is None else images.distinguish(tokens)


def common_length(first: np.ndarray, second: np.ndarray) -> int:
    """Return the length of the common prefix of two sequences."""
    n = min(len(first), len(second))
    differs = first[:n] != second[:n]
    return int(differs.argmax()) if differs.any() else n
