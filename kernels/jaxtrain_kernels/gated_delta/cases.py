"""The shapes of the gated delta rule: read by tests and benchmarks."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jaxtrain_kernels import testing


@dataclass(frozen=True)
class Case:
    """A problem: queries and keys of length 1 (queries scaled), values standard normal."""

    name: str
    forest: Callable[[], list[tuple[int, int]]]
    """Nodes of every row; rows of a batch share it."""
    tokens: int
    """Row length T."""
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    tags: frozenset[str]
    """"ci": tests; "bench": benchmarks."""
    gates: str = "slow"
    """"init": a new model's, about -10 a token; "slow": a trained model's, about -0.01; "hard":
    almost none, betas near 1 and keys that repeat."""
    rows: int = 1

    def inputs(self, seed: int = 0) -> dict[str, np.ndarray]:
        """Arguments of `gated_delta` and `d_out`, float32 and int32 numpy."""
        rng = np.random.default_rng(seed)
        B, T, H, K = self.rows, self.tokens, self.key_heads, self.key_dim
        N, V = self.value_heads, self.value_dim

        def normal(*shape):
            return rng.standard_normal(shape, np.float32)

        def unit(x):
            return x / np.sqrt((x * x).sum(-1, keepdims=True))

        k, a = normal(B, T, H, K), np.log1p(np.exp(normal(B, T, N) + 1))
        beta = 1 / (1 + np.exp(-normal(B, T, N)))
        g = {"init": -8.0 * a, "slow": -0.01 * a, "hard": -4e-4 * a}[self.gates]
        if self.gates == "hard":
            few = unit(normal(4, K))
            k = few[rng.integers(0, 4, (B, T, H))] + 0.4 * k / np.float32(K**0.5)
            beta = 1 - 0.02 * rng.random((B, T, N), np.float32)
        row = testing.pack(self.forest(), self.tokens)
        used = np.arange(T) < sum(size for size, _ in self.forest())
        row["until"] = np.where(used, row["until"], 0).astype(np.int32)
        return {
            "q": unit(normal(B, T, H, K)) * np.float32(K**-0.5),
            "k": unit(k),
            "v": normal(B, T, N, V),
            "g": g.astype(np.float32),
            "beta": beta.astype(np.float32),
            "until": np.tile(row["until"], (B, 1)),
            "prev": np.tile(row["prev"], (B, 1)),
            "d_out": normal(B, T, N, V),
        }


def small_tree():
    return testing.agent_tree(4, 30, 9)


def documents():
    return testing.documents([60, 3, 35, 1])


def tree_8k():
    return testing.agent_tree(20, 330, 70)


def tree_32k():
    return testing.agent_tree(28, 1000, 170)


def documents_8k():
    rng = np.random.default_rng(0)
    return testing.documents([int(n) for n in rng.integers(50, 250, 53)])


def group_8k():
    return [(200, -1)] + [(int(n), 0) for n in np.linspace(500, 1090, 10)]


CI, BENCH = frozenset({"ci"}), frozenset({"bench"})

CASES = [
    Case("tree_h2_4_slow", small_tree, 192, 2, 4, 16, 24, CI),
    Case("tree_h1_3_init", small_tree, 192, 1, 3, 16, 24, CI, gates="init"),
    Case("tree_h2_2_hard", small_tree, 192, 2, 2, 16, 24, CI, gates="hard"),
    Case("documents_rows2_h2_4", documents, 128, 2, 4, 16, 24, CI, rows=2),
    Case("one8k_h16_32", lambda: testing.documents([8192]), 8192, 16, 32, 128, 128, BENCH),
    Case("one32k_h16_32", lambda: testing.documents([32768]), 32768, 16, 32, 128, 128, BENCH),
    Case("tree8k_h16_32", tree_8k, 8192, 16, 32, 128, 128, BENCH),
    Case("tree32k_h16_32", tree_32k, 32768, 16, 32, 128, 128, BENCH),
    Case("documents8k_h16_32", documents_8k, 8192, 16, 32, 128, 128, BENCH),
    Case("group8k_h16_32", group_8k, 8704, 16, 32, 128, 128, BENCH),
    Case("one8k_h16_16", lambda: testing.documents([8192]), 8192, 16, 16, 128, 128, BENCH),
    Case("one8k_h32_32", lambda: testing.documents([8192]), 8192, 32, 32, 128, 128, BENCH),
]
