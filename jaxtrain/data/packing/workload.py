"""Savings of trees, in numbers and as readable text."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields

import numpy as np

from jaxtrain.data.packing.tree import Tree


@dataclass(frozen=True)
class Workload:
    """Sizes of a tree."""

    branches: int
    """K"""
    packed_tokens: int
    """N"""
    path_tokens: int
    """Tokens of the longest branch."""
    token_ratio: float
    """Tokens of all branches separately, over N: the saving in matmuls."""
    pair_ratio: float
    """Visible pairs of all branches separately, over those of the tree: the saving in attention."""


def measure_tree(tree: Tree) -> Workload:
    """Measure a tree; both ratios are 1 for a chain."""
    lengths = np.array(tree.branch_lengths(), np.float64)
    pairs = 0.0
    for node, depth in zip(tree.nodes, tree.depths, strict=True):
        stop = depth + len(node.tokens)
        pairs += (stop * (stop + 1) - depth * (depth + 1)) / 2
    return Workload(
        branches=tree.num_branches,
        packed_tokens=tree.num_tokens,
        path_tokens=int(lengths.max()),
        token_ratio=float(lengths.sum() / tree.num_tokens),
        pair_ratio=float((lengths * (lengths + 1) / 2).sum() / pairs),
    )


def describe_workload(trees: Iterable[Tree]) -> str:
    """Format the mean and maximum of each number over the trees as a small table."""
    workloads = [measure_tree(tree) for tree in trees]
    lines = [f"{len(workloads)} trees{'mean':>17}{'max':>10}"]
    for field in fields(Workload):
        values = [getattr(workload, field.name) for workload in workloads]
        title = field.name.replace("_", " ")
        lines.append(f"{title:<16}{np.mean(values):>10.2f}{np.max(values):>10.2f}")
    return "\n".join(lines)


def describe_tree(tree: Tree, decode: Callable[[Sequence[int]], str] | None = None) -> str:
    """Outline a tree: a line per node with role, tokens, trained tokens, and g/K.

    A chain, and a trunk with only leaves at its side, runs straight down; other children hang off
    their parent. * marks a branch that ends inside the tree. decode: tokens -> text, whose
    beginning is shown.
    """
    size = measure_tree(tree)
    lines = [
        f"K {size.branches}  packed {size.packed_tokens}  longest path {size.path_tokens}"
        f"  token ratio {size.token_ratio:.2f}  pair ratio {size.pair_ratio:.2f}"
        + (f"  {tree.origin}" if tree.origin else "")
    ]
    stack = [(0, "", "")]
    while stack:
        index, lead, indent = stack.pop()
        lines.append(lead + _describe_node(tree, index, decode))
        *sides, last = tree.children(index) or (None,)
        if last is None:
            continue
        if tree.children(last) and not any(map(tree.children, sides)):
            stack.append((last, indent, indent))  # do not indent a trunk
        else:
            lead = "└─ " if sides else ""
            stack.append((last, indent + lead, indent + " " * len(lead)))
        for child in reversed(sides):
            stack.append((child, indent + "├─ ", indent + "│  "))
    return "\n".join(lines)


def _describe_node(tree: Tree, index: int, decode: Callable | None) -> str:
    node = tree.nodes[index]
    trained = np.any([values != 0 for values in node.weights.values()], axis=0)
    count = int(np.sum(trained[1:] if index == 0 else trained))
    share = f", {count} trained x {tree.branch_counts[index]}/{tree.num_branches}" if count else ""
    text = ""
    if decode is not None:
        shown = " ".join(decode(node.tokens[:24].tolist()).split())
        text = f"  {shown[:60]!r}"
    ends = " *" if index in tree.ends and tree.children(index) else ""
    return f"{node.role or 'tokens'} {len(node.tokens)}{share}{ends}{text}"
