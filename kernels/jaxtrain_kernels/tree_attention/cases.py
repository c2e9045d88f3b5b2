"""The shapes of tree attention: read by tests, benchmarks and autotuning."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jaxtrain_kernels import testing


@dataclass(frozen=True)
class Case:
    """One attention problem; inputs are standard normal."""

    name: str
    forest: Callable[[], list[tuple[int, int]]]
    """Nodes of every row; rows of a batch share it."""
    tokens: int
    """Row length T (= S)."""
    heads: int
    kv_heads: int
    head_dim: int
    tags: frozenset[str]
    """"ci": tests; "bench": benchmarks; "tune": autotuning."""
    rows: int = 1
    window: int | None = None
    softcap: float | None = None

    def inputs(self, seed: int = 0) -> dict[str, np.ndarray]:
        """Arguments of `attention` and `d_out`, float32 and int32 numpy."""
        rng = np.random.default_rng(seed)
        q_shape = (self.rows, self.tokens, self.heads, self.head_dim)
        k_shape = (self.rows, self.tokens, self.kv_heads, self.head_dim)
        shapes = {"q": q_shape, "k": k_shape, "v": k_shape, "d_out": q_shape}
        row = testing.pack(self.forest(), self.tokens)
        arrays = {n: rng.standard_normal(s, np.float32) for n, s in shapes.items()}
        for name in ("until", "positions"):
            arrays[name] = np.tile(row[name], (self.rows, 1))
        return arrays

    def pairs(self) -> int:
        """Visible (query, key) pairs of the batch (without the window)."""
        until = testing.pack(self.forest(), self.tokens)["until"].astype(np.int64)
        return self.rows * int((until - np.arange(self.tokens)).sum())


def small_tree():
    return testing.agent_tree(4, 40, 12)


def documents():
    return testing.documents([100, 3, 60, 1])


def tree_8k():
    return testing.agent_tree(20, 330, 70)


def tree_32k():
    return testing.agent_tree(28, 1000, 170)


def documents_32k():
    return testing.documents([4096] * 8)


def documents_8k():
    return testing.documents([700, 410, 880, 520, 300, 640, 760, 590, 450, 830, 370, 680, 560, 480])


def one_32k():
    return testing.documents([32768])


CI, BENCH, TUNE = frozenset({"ci"}), frozenset({"bench"}), frozenset({"bench", "tune"})

CASES = [
    Case("tree_h4_2_d64", small_tree, 256, 4, 2, 64, CI),
    Case("tree_h2_2_d128", small_tree, 256, 2, 2, 128, CI),
    Case("tree_h2_1_d256", small_tree, 256, 2, 1, 256, CI),
    Case("tree_h4_1_d64_softcap", small_tree, 256, 4, 1, 64, CI, softcap=2.0),
    Case("tree_h2_1_d64_window", small_tree, 256, 2, 1, 64, CI, window=17),
    Case("documents_rows2_h2_1_d64", documents, 192, 2, 1, 64, CI, rows=2),
    Case("tree8k_h16_8_d128", tree_8k, 8192, 16, 8, 128, TUNE),
    Case("tree32k_h16_8_d128", tree_32k, 32768, 16, 8, 128, TUNE),
    Case("tree32k_h32_8_d128", tree_32k, 32768, 32, 8, 128, BENCH),
    Case("tree32k_h16_8_d64", tree_32k, 32768, 16, 8, 64, TUNE),
    Case("tree32k_h16_4_d256", tree_32k, 32768, 16, 4, 256, TUNE),
    Case("documents32k_h16_8_d128", documents_32k, 32768, 16, 8, 128, BENCH),
    Case("documents8k_h16_8_d128", documents_8k, 8192, 16, 8, 128, BENCH),
    Case("causal32k_h16_8_d128", one_32k, 32768, 16, 8, 128, BENCH),
]
