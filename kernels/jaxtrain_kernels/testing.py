"""Shared by kernel tests and benchmarks: forests, inputs from a case, the tolerance rule."""

from collections.abc import Callable

import ml_dtypes
import numpy as np


def agent_tree(turns: int, trunk: int, leaf: int, seed: int = 0) -> list[tuple[int, int]]:
    """(size, parent) of the nodes of a caterpillar: a trunk of turns, each with a leaf beside it.

    What an agent run leaves behind whose thinking is dropped from the context of later turns.
    """
    rng = np.random.default_rng(seed)

    def around(mean: int, spread: int) -> int:
        return max(1, mean + int(rng.integers(-spread, spread + 1)))

    nodes, last = [], -1
    for _ in range(turns):
        nodes.append((around(trunk, trunk // 3), last))
        last = len(nodes) - 1
        nodes.append((around(leaf, leaf // 2), last))
    return nodes


def documents(sizes: list[int]) -> list[tuple[int, int]]:
    """(size, parent) of plain packed documents."""
    return [(size, -1) for size in sizes]


def random_forest(rng: np.random.Generator, tokens: int, mean: int = 12) -> list[tuple[int, int]]:
    """(size, parent) of random nodes in depth-first order, `tokens` tokens in all."""
    nodes, path, remaining = [], [], tokens
    while remaining:
        while path and rng.random() < 0.45:
            path.pop()
        size = min(remaining, int(rng.integers(1, 2 * mean)))
        nodes.append((size, path[-1] if path else -1))
        path.append(len(nodes) - 1)
        remaining -= size
    return nodes


def pack(nodes: list[tuple[int, int]], length: int) -> dict[str, np.ndarray]:
    """`until`, `positions` and `prev` (int32 [length]) of a forest, padded to a row.

    A node's tokens follow each other; nodes come in depth-first preorder (asserted).
    """
    sizes = np.array([size for size, _ in nodes])
    starts = np.concatenate([[0], np.cumsum(sizes)])
    assert starts[-1] <= length, f"{starts[-1]} tokens do not fit a row of {length}"
    index = np.arange(length, dtype=np.int32)
    until, positions, prev = index + 1, np.zeros(length, np.int32), index * 0 - 1
    ends, depths = starts[1:].copy(), np.zeros(len(nodes), int)
    path = []
    for node, (size, parent) in enumerate(nodes):
        while path and path[-1] != parent:
            path.pop()
        assert parent < 0 or path, f"node {node} is not in depth-first order"
        path.append(node)
        start, stop = starts[node], starts[node + 1]
        depths[node] = 0 if parent < 0 else depths[parent] + sizes[parent]
        positions[start:stop] = depths[node] + np.arange(size)
        prev[start:stop] = index[start:stop] - 1
        prev[start] = -1 if parent < 0 else starts[parent + 1] - 1
        for ancestor in path:
            ends[ancestor] = stop
    for node in range(len(nodes)):
        until[starts[node] : starts[node + 1]] = ends[node]
    return {"until": until, "positions": positions, "prev": prev}


def rounding(dtype) -> float:
    """Relative error of one rounding to `dtype` (bfloat16 included)."""
    return float(ml_dtypes.finfo(dtype).eps) / 2


def assert_accurate(
    actual, exact, plain, dtype, label: str = "result", factor: float = 2.0, norm: Callable = np.max
) -> None:
    """The tolerance rule: error at most `factor` times that of the same maths done plainly.

    `exact` float64; `plain` the reference in the low precision of the inputs; plus one rounding
    of the largest exact value to `dtype`, so that a lucky plain result does not set the bar.
    """
    actual, exact, plain = (np.asarray(x, np.float64) for x in (actual, exact, plain))
    assert actual.shape == exact.shape, f"{label}: shape {actual.shape}, want {exact.shape}"
    assert np.isfinite(actual).all(), f"{label}: not finite"
    error, bar = norm(np.abs(actual - exact)), norm(np.abs(plain - exact))
    allowed = factor * bar + rounding(dtype) * np.abs(exact).max()
    assert error <= allowed, f"{label}: error {error:.3e}, plain error {bar:.3e}, max {allowed:.3e}"
