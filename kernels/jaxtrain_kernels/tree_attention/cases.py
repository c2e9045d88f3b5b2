"""The shapes of tree attention: read by tests, benchmarks and autotuning."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jaxtrain_kernels import testing


@dataclass(frozen=True)
class Case:
    """An attention problem; inputs are standard normal."""

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
    v_dim: int | None = None
    """Of values; None: `head_dim`."""
    sinks: bool = False
    layout: "DraftBlocks | UnrolledDraft | None" = None
    """Keys and queries beside the row's own tokens."""

    def intervals(self) -> dict[str, np.ndarray]:
        """`until`, `positions`, `key_positions` of a row and, where not causal, `since`."""
        row = testing.pack(self.forest(), self.tokens)
        if self.layout is not None:
            return self.layout.intervals(row)
        return {"key_positions": row["positions"]} | {n: row[n] for n in ("until", "positions")}

    def inputs(self, seed: int = 0) -> dict[str, np.ndarray]:
        """Arguments of `attention` and `d_out`, float32 and int32 numpy."""
        rng = np.random.default_rng(seed)
        row = self.intervals()
        q_shape = (self.rows, len(row["positions"]), self.heads, self.head_dim)
        k_shape = (self.rows, len(row["until"]), self.kv_heads, self.head_dim)
        shapes = {"q": q_shape, "k": k_shape, "v": k_shape, "d_out": q_shape}
        if self.v_dim:
            shapes |= {n: (*shapes[n][:-1], self.v_dim) for n in ("v", "d_out")}
        if self.sinks:
            shapes["sinks"] = (self.heads,)
        arrays = {n: rng.standard_normal(s, np.float32) for n, s in shapes.items()}
        return arrays | {n: np.tile(x, (self.rows, 1)) for n, x in row.items()}

    def flops(self) -> float:
        """FLOPs of the forward's matmuls; the backward has 2.5 times as many."""
        return 2 * self.heads * (self.head_dim + (self.v_dim or self.head_dim)) * self.pairs()

    def pairs(self) -> int:
        """Visible (query, key) pairs of the batch (without the window)."""
        row = self.intervals()
        since = row.get("since", np.arange(len(row["until"])))
        return self.rows * int(np.maximum(row["until"].astype(np.int64) - since, 0).sum())


@dataclass(frozen=True)
class DraftBlocks:
    """A block-diffusion draft: queries are blocks, keys the row's tokens and then the blocks.

    A block sees the tokens before its anchor on the anchor's branch, and all of itself.
    """

    count: int
    size: int

    def anchors(self, row: dict[str, np.ndarray]) -> np.ndarray:
        """First tokens of the blocks, ascending, drawn without replacement."""
        real = np.flatnonzero(row["prev"] >= 0)
        return np.sort(np.random.default_rng(1).choice(real, self.count, replace=False))

    def intervals(self, row: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        anchors, tokens = self.anchors(row), np.arange(len(row["until"]))
        first = np.arange(self.count * self.size) // self.size * self.size
        places = (row["positions"][anchors][:, None] + np.arange(self.size)).ravel()
        since = self.size * np.searchsorted(anchors, tokens, "right")
        until = self.size * np.searchsorted(anchors, row["until"], "left")
        intervals = {
            "since": np.concatenate([since, first]),
            "until": np.concatenate([until, first + self.size]),
            "positions": places,
            "key_positions": np.concatenate([row["positions"], places]),
        }
        return {name: array.astype(np.int32) for name, array in intervals.items()}


@dataclass(frozen=True)
class UnrolledDraft:
    """A draft's step `steps` of an unroll: keys are the row's tokens once for each step so far.

    Those of the first are seen as in any forest, later ones by the query of their own place alone.
    """

    steps: int

    def intervals(self, row: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        tokens, steps = np.arange(len(row["until"]), dtype=np.int32), self.steps
        places = [row["positions"] + step for step in range(steps + 1)]
        return {
            "since": np.tile(tokens, steps + 1),
            "until": np.concatenate([row["until"], *[tokens + 1] * steps]),
            "positions": places[-1],
            "key_positions": np.concatenate(places),
        }


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


def group_20k():
    """A prompt and sixteen answers to it."""
    return [(1024, -1)] + [(1216, 0)] * 16


def one_2k():
    return testing.documents([2048])


def one_8k():
    return testing.documents([8192])


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
    Case("blocks_h2_1_d64", small_tree, 256, 2, 1, 64, CI, layout=DraftBlocks(12, 4)),
    Case("unrolled_h2_1_d64", small_tree, 256, 2, 1, 64, CI, layout=UnrolledDraft(2)),
    Case("tree8k_h16_8_d128", tree_8k, 8192, 16, 8, 128, TUNE),
    Case("tree32k_h16_8_d128", tree_32k, 32768, 16, 8, 128, TUNE),
    Case("tree32k_h32_8_d128", tree_32k, 32768, 32, 8, 128, BENCH),
    Case("tree32k_h16_8_d64", tree_32k, 32768, 16, 8, 64, TUNE),
    Case("tree32k_h16_4_d256", tree_32k, 32768, 16, 4, 256, TUNE),
    Case("tree8k_h16_2_d512", tree_8k, 8192, 16, 2, 512, BENCH),  # as in Gemma 4's full layers
    # DeepSeek's latent attention, expanded; gpt-oss, whose pairs are without the window
    Case("tree8k_h16_16_d192_v128", tree_8k, 8192, 16, 16, 192, TUNE, v_dim=128),
    Case("tree8k_h64_8_d64_sinks", tree_8k, 8192, 64, 8, 64, BENCH, sinks=True),
    Case("tree8k_h64_8_d64_window", tree_8k, 8192, 64, 8, 64, BENCH, sinks=True, window=128),
    Case("group20k_h32_8_d128", group_20k, 20480, 32, 8, 128, BENCH),
    Case("documents32k_h16_8_d128", documents_32k, 32768, 16, 8, 128, BENCH),
    Case("documents8k_h16_8_d128", documents_8k, 8192, 16, 8, 128, BENCH),
    Case("causal32k_h16_8_d128", one_32k, 32768, 16, 8, 128, BENCH),
    Case("blocks2k_h32_8_d128", one_2k, 2048, 32, 8, 128, BENCH, layout=DraftBlocks(512, 16)),
    Case("blocks8k_h32_8_d128", one_8k, 8192, 32, 8, 128, BENCH, layout=DraftBlocks(512, 16)),
    Case("blocks_tree8k_h32_8_d128", tree_8k, 8192, 32, 8, 128, BENCH, layout=DraftBlocks(512, 16)),
    Case("unrolled2k_h32_8_d128", one_2k, 2048, 32, 8, 128, BENCH, layout=UnrolledDraft(6)),
    Case("unrolled8k_h32_8_d128", one_8k, 8192, 32, 8, 128, BENCH, layout=UnrolledDraft(6)),
    Case("unrolled_tree8k_h32_8_d128", tree_8k, 8192, 32, 8, 128, BENCH, layout=UnrolledDraft(6)),
]
