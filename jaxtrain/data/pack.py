"""Trees into rows: depth-first layout, first-fit-decreasing, and the arrays of a Batch.

    tree:   trunk ─┬─ a          row (T = 9):  trunk trunk  a  a  b  b  b   .  .
                   └─ b          prev          -1    0      1  2  1  4  5  -1 -1
                                 until          7    7      4  4  7  7  7   8  9
                                 positions      0    1      2  3  2  3  4   0  0

Depth-first preorder puts every subtree in one contiguous run, hence one number a key (`until`) says
who sees it. Every tree of a row is divided by its own K.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from jaxtrain.batch import Batch
from jaxtrain.data.tree import Tree, Weights

Normalise = Literal["token", "tree", "branch"]


@dataclass(frozen=True, eq=False)
class Packed:
    """One tree in depth-first preorder; all arrays [N], indices from the tree's own start."""

    tokens: np.ndarray
    positions: np.ndarray
    """Depth along the own branch."""
    prev: np.ndarray
    """Index of the token that predicts this one; -1 at the root."""
    until: np.ndarray
    """End of the subtree: this token is visible to queries index <= q < until."""
    owner: np.ndarray
    """Branch of the token; the first one where branches share it."""
    node: np.ndarray
    """Index of the tree's node that holds the token."""
    weights: Weights
    """float64; 0 on the first token, which nothing predicts."""
    streams: dict[str, np.ndarray]
    num_branches: int


def lay_out(tree: Tree, normalise: Normalise = "token") -> Packed:
    """Pack one tree; `normalise` divides its weights.

    "token": by K, so that a tree counts as its average branch (weight g/K). "tree": by the sum of
    its weights, so that each tree counts as one. "branch": by 1, so that each branch counts as
    itself (weight g), which is per-branch training.
    """
    if len(tree.nodes) == 1:
        packed = _lay_out_chain(tree)
    else:
        packed = _lay_out_nodes(tree)
    for name, values in packed.weights.items():
        values[0] = 0.0
        if normalise == "token":
            values /= packed.num_branches
        elif normalise == "tree":
            total = values.sum()
            if total:
                packed.weights[name] = values / total
    return packed


def _lay_out_chain(tree: Tree) -> Packed:
    node = tree.nodes[0]
    n = len(node.tokens)
    index = np.arange(n, dtype=np.int32)
    zeros = np.zeros(n, np.int32)
    return Packed(
        tokens=node.tokens,
        positions=index,
        prev=index - 1,
        until=np.full(n, n, np.int32),
        owner=zeros,
        node=zeros,
        weights={name: np.array(values, np.float64) for name, values in node.weights.items()},
        streams=dict(node.streams),
        num_branches=tree.num_branches,
    )


def _lay_out_nodes(tree: Tree) -> Packed:
    order = tree.preorder()
    lengths = np.array([len(node.tokens) for node in tree.nodes])
    starts = np.zeros(len(order), np.int64)
    starts[order[1:]] = np.cumsum(lengths[order])[:-1]
    stops = starts + lengths
    subtree_stops = stops.copy()
    first_branch = np.full(len(order), tree.num_branches)
    np.minimum.at(first_branch, list(tree.ends), np.arange(tree.num_branches))
    for index in range(len(order) - 1, 0, -1):
        parent = tree.nodes[index].parent
        subtree_stops[parent] = max(subtree_stops[parent], subtree_stops[index])
        first_branch[parent] = min(first_branch[parent], first_branch[index])

    node = np.repeat(order, lengths[order]).astype(np.int32)
    index = np.arange(len(node), dtype=np.int32)
    prev = index - 1
    for child in order[1:]:
        prev[starts[child]] = stops[tree.nodes[child].parent] - 1
    nodes = [tree.nodes[i] for i in order]
    return Packed(
        tokens=np.concatenate([n.tokens for n in nodes]),
        positions=(index - starts[node] + np.array(tree.depths)[node]).astype(np.int32),
        prev=prev,
        until=subtree_stops[node].astype(np.int32),
        owner=first_branch[node].astype(np.int32),
        node=node,
        weights={
            name: np.concatenate([np.asarray(n.weights[name], np.float64) for n in nodes])
            for name in nodes[0].weights
        },
        streams={
            name: np.concatenate([n.streams[name] for n in nodes]) for name in nodes[0].streams
        },
        num_branches=tree.num_branches,
    )


def fit_rows(
    lengths: Sequence[int], row_tokens: int, opened: Sequence[int] = ()
) -> list[list[int]]:
    """First-fit-decreasing: indices of `lengths` by row; ties keep their order.

    `opened` already lie in the first row together and stay there. Every length is at most
    `row_tokens`. (Johnson 1973: at most 11/9 of the best number of rows, plus one.)
    """
    sizes = np.asarray(lengths, np.int64)
    rows: list[list[int]] = []
    room = np.zeros(len(sizes) + 1, np.int64)
    if len(opened):
        rows.append(list(opened))
        room[0] = row_tokens - sizes[list(opened)].sum()
    already = set(opened)
    for index in np.argsort(-sizes, kind="stable").tolist():
        if index in already:
            continue
        size = sizes[index]
        assert size <= row_tokens, f"a tree of {size} tokens in a row of {row_tokens}"
        fits = room[: len(rows)] >= size
        row = int(fits.argmax()) if len(rows) else 0
        if not len(rows) or not fits[row]:
            row = len(rows)
            rows.append([])
            room[row] = row_tokens
        rows[row].append(index)
        room[row] -= size
    return rows


def build_batch(
    rows: Sequence[Sequence[Packed]],
    row_tokens: int,
    *,
    components: Sequence[str] = ("nll",),
    streams: Sequence[str] = (),
    dtype: type = np.float32,
) -> Batch:
    """Batch [B, T] of `rows`, each a list of packed trees that fit; a row may be empty.

    Padding: token 0, prev -1, until index + 1, owner -1, weight 0. `components` and `streams` are
    always present, so that every batch of a run has the same structure.
    """
    shape = (len(rows), row_tokens)
    tokens, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    prev, owner = np.full(shape, -1, np.int32), np.full(shape, -1, np.int32)
    until = np.broadcast_to(np.arange(1, row_tokens + 1, dtype=np.int32), shape).copy()
    weights = {name: np.zeros(shape, dtype) for name in components}
    extra = {name: np.zeros(shape, np.float32) for name in streams}
    for b, row in enumerate(rows):
        start = branch = 0
        for tree in row:
            stop = start + len(tree.tokens)
            assert stop <= row_tokens, f"row {b} holds more than {row_tokens} tokens"
            tokens[b, start:stop] = tree.tokens
            positions[b, start:stop] = tree.positions
            np.add(tree.prev, start, out=prev[b, start:stop], where=tree.prev >= 0)
            until[b, start:stop] = tree.until + start
            owner[b, start:stop] = tree.owner + branch
            for name, values in tree.weights.items():
                weights[name][b, start:stop] = values
            for name in extra:
                if name in tree.streams:
                    extra[name][b, start:stop] = tree.streams[name]
            start, branch = stop, branch + tree.num_branches
    return Batch(tokens, positions, prev, until, weights, owner=owner, streams=extra)


def stack_batches(batches: Sequence[Batch]) -> Batch:
    """[A, B, T] from A batches [B, T] of one shape."""
    first = batches[0]
    return Batch(
        *(np.stack(field) for field in zip(*(batch[:4] for batch in batches), strict=True)),
        weights={n: np.stack([batch.weights[n] for batch in batches]) for n in first.weights},
        owner=np.stack([np.asarray(batch.owner) for batch in batches]),
        streams={n: np.stack([batch.streams[n] for batch in batches]) for n in first.streams},
    )
