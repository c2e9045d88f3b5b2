"""The shapes of conv_heads: read by tests and benchmarks."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jaxtrain_kernels import testing
from jaxtrain_kernels.gated_delta.cases import documents_8k, tree_8k


@dataclass(frozen=True)
class Case:
    """A problem: H key heads of `dim` columns, and `repeats` value heads of `dim` for each."""

    name: str
    forest: Callable[[], list[tuple[int, int]]]
    tokens: int
    key_heads: int
    repeats: int
    dim: int
    tags: frozenset[str]
    """"ci": tests; "bench": benchmarks."""
    taps: int = 4

    @property
    def width(self) -> int:
        """F: columns of a key head."""
        return (2 + self.repeats) * self.dim

    def inputs(self, seed: int = 0) -> dict[str, np.ndarray]:
        """x [1, T, H F + 24], w [H, F, W], prev [1, T] and cotangents d_q, d_k, d_v."""
        rng = np.random.default_rng(seed)
        T, H, K = self.tokens, self.key_heads, self.dim

        def normal(*shape):
            return rng.standard_normal(shape, np.float32)

        return {
            "x": normal(1, T, H * self.width + 24),
            "w": normal(H, self.width, self.taps) * np.float32(0.5),
            "prev": testing.pack(self.forest(), T)["prev"][None].astype(np.int32),
            "d_q": normal(1, T, H, K),
            "d_k": normal(1, T, H, K),
            "d_v": normal(1, T, H * self.repeats, K),
        }

    def moved_bytes(self, itemsize: int = 2) -> tuple[int, int]:
        """(forward, backward): every number read once and written once."""
        array = self.tokens * self.key_heads * self.width * itemsize
        return 2 * array, 3 * array


def short_nodes():
    """Branches of one token from one token, on each other, and a chain behind them."""
    return [(70, -1), (1, 0), (1, 0), (2, 0), (1, 3), (3, 4), (1, 3), (1, 0), (90, 7)]


def small_tree():
    return testing.agent_tree(4, 30, 9)


def documents():
    return testing.documents([60, 1, 1, 35, 1, 80])


CI, BENCH = frozenset({"ci"}), frozenset({"bench"})

CASES = [
    Case("tree", small_tree, 200, 2, 2, 64, CI),
    Case("documents", documents, 200, 2, 2, 64, CI),
    Case("short_nodes", short_nodes, 200, 2, 2, 64, CI),
    Case("documents8k_h16_r1", documents_8k, 8192, 16, 1, 128, BENCH),
    Case("tree8k_h16_r2", tree_8k, 8192, 16, 2, 128, BENCH),
]
