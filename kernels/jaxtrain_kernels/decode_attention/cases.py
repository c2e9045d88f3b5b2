"""The shapes of decode attention: read by tests and benchmarks."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Case:
    """A problem: rows see slots up to a random number of `filled`, the last `window` of them."""

    name: str
    rows: int
    slots: int
    heads: int
    kv_heads: int
    head_dim: int
    filled: tuple[int, int]
    tags: frozenset[str]
    """"ci": tests; "bench": benchmarks."""
    layers: int = 2
    window: int | None = None
    softcap: float | None = None
    group: int = 1
    """So many rows share the slots that all rows see, those of a prompt."""

    def interval(self, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """`until` and `since`, int32 [B]; the first row is as full as rows get."""
        low, high = self.filled
        until = np.random.default_rng(seed).integers(low, high + 1, self.rows, np.int32)
        until[0] = high
        since = np.maximum(until - (self.window or self.slots), 0)
        return until, since

    def sharing(self) -> dict[str, np.ndarray]:
        """`leader` and `shared`, int32 [B], of a case with groups."""
        if self.group == 1:
            return {}
        row = np.arange(self.rows, dtype=np.int32)
        return {"leader": row - row % self.group, "shared": np.full_like(row, self.filled[0])}

    def inputs(self, seed: int = 0) -> dict[str, np.ndarray]:
        """`q` [B, N, H], `k`, `v` [L, B, S, K, H] in float32; what rows share is not alike yet."""
        rng = np.random.default_rng(seed)
        cache = (self.layers, self.rows, self.slots, self.kv_heads, self.head_dim)
        shapes = {"q": (self.rows, self.heads, self.head_dim), "k": cache, "v": cache}
        return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}

    def read_bytes(self, itemsize: int = 2) -> int:
        """Bytes of the keys and values that the rows see."""
        until, since = self.interval()
        slots = int((until - since).sum())
        if self.group > 1:
            slots -= (self.rows - self.rows // self.group) * self.filled[0]
        return 2 * itemsize * self.kv_heads * self.head_dim * slots


CI, BENCH = frozenset({"ci"}), frozenset({"bench"})

CASES = [
    Case("ragged", 5, 96, 4, 2, 64, (0, 96), CI),
    Case("one_head", 3, 40, 1, 1, 64, (1, 40), CI),
    Case("window", 6, 150, 8, 8, 64, (0, 150), CI, window=37),
    Case("group3_softcap", 4, 70, 18, 6, 64, (1, 70), CI, softcap=2.0),
    Case("group16", 2, 50, 32, 2, 64, (0, 50), CI, layers=3),
    Case("group7", 2, 70, 28, 4, 128, (9, 70), CI, layers=1),
    Case("d128", 3, 130, 16, 8, 128, (1, 130), CI),
    Case("d256", 2, 40, 8, 4, 256, (2, 40), CI),
    Case("b128_s1280", 128, 1280, 16, 8, 128, (256, 1280), BENCH, layers=4),
    Case("b128_s1280_groups", 128, 1280, 16, 8, 128, (256, 1280), BENCH, layers=4, group=16),
    Case("b16_s8192", 16, 8192, 16, 8, 128, (2048, 8192), BENCH, layers=4),
]
