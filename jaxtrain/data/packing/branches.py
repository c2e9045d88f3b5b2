"""Branches of a tree, or of a packed batch, as separate sequences."""

from dataclasses import dataclass, field

import numpy as np

from jaxtrain.batch import Batch
from jaxtrain.data.packing.tree import Forest, Tree, TreeGroup


@dataclass(frozen=True, eq=False)
class TreeBranch:
    """Sequence from the root to the end of a branch."""

    tokens: np.ndarray
    """int32 [n]."""
    weights: dict[str, np.ndarray]
    """{component: float [n]}; weights of shared tokens are divided evenly between the branches, so
    that all branches add up to the tree or batch. 0 is context."""
    streams: dict[str, np.ndarray] = field(default_factory=dict)
    """{name: [n, ...]}: advantages, log-probs and the like, equal on all branches of a token."""
    row: tuple[int, ...] = ()
    """Indices of its row in a batch [..., T]."""


def list_branches(of: Tree | Forest | TreeGroup | Batch) -> list[TreeBranch]:
    """List the branches of a tree in the order of its `ends`, of a forest or group tree by tree, of
    a batch [..., T] of host arrays row by row from left to right.

    A batch does not record branches that end inside another one: it has one branch per leaf.
    """
    if isinstance(of, Tree):
        return [_of_tree(of, end) for end in of.ends]
    if isinstance(of, Forest | TreeGroup):
        return [branch for tree in of.trees for branch in list_branches(tree)]
    rows = np.ndindex(*np.shape(of.tokens)[:-1])
    return [branch for row in rows for branch in _of_row(of, row)]


def _of_tree(tree: Tree, end: int) -> TreeBranch:
    path = tree.root_path(end)
    nodes = [tree.nodes[i] for i in path]
    return TreeBranch(
        tokens=np.concatenate([node.tokens for node in nodes]),
        weights={
            name: np.concatenate(
                [tree.nodes[i].weights[name] / tree.branch_counts[i] for i in path]
            )
            for name in nodes[0].weights
        },
        streams={
            name: np.concatenate([node.streams[name] for node in nodes])
            for name in nodes[0].streams
        },
    )


def _of_row(batch: Batch, row: tuple[int, ...]) -> list[TreeBranch]:
    prev, until = np.asarray(batch.prev)[row], np.asarray(batch.until)[row]
    index = np.arange(len(prev))
    if batch.owner is not None:
        real = np.asarray(batch.owner)[row] >= 0
    else:  # a lone token predicts nothing and nothing predicts it: the same as padding
        real = (prev >= 0) | (until > index + 1)
    leaf = real.copy()
    leaf[prev[prev >= 0]] = False
    counted = np.concatenate([[0], np.cumsum(leaf)])
    through = np.maximum(counted[until] - counted[index], 1)  # leaves of each token's subtree
    branches = []
    for end in np.flatnonzero(leaf):
        path = [int(end)]
        while prev[path[-1]] >= 0:
            path.append(int(prev[path[-1]]))
        path = path[::-1]
        branches.append(
            TreeBranch(
                tokens=np.asarray(batch.tokens)[row][path],
                weights={
                    name: np.asarray(values)[row][path] / through[path]
                    for name, values in batch.weights.items()
                },
                streams={
                    name: np.asarray(values)[row][path] for name, values in batch.streams.items()
                },
                row=row,
            )
        )
    return branches
