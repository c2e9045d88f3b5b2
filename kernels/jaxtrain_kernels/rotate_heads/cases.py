"""The shapes of rotate_heads: read by tests, benchmarks and autotuning."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Case:
    """A problem: the heads of a product, of which `counts` are rotated and `passed` pass."""

    name: str
    rows: int
    tokens: int
    counts: tuple[int, ...]
    passed: int
    head_dim: int
    tags: frozenset[str]
    """"ci": tests; "bench": benchmarks; "tune": autotuning."""
    normed: bool = True
    rotated_dims: int | None = None
    """Of a head's; by default all."""

    @property
    def half(self) -> int:
        return (self.rotated_dims or self.head_dim) // 2

    def inputs(self, seed: int = 0) -> dict[str, np.ndarray]:
        """`x` [B, T, F] and its cotangents `d_out` (the parts side by side), `cos`, `sin`
        [B, T, R/2], maybe `scales` [parts, H], in float32."""
        rng = np.random.default_rng(seed)
        B, T, H = self.rows, self.tokens, self.head_dim
        width = (sum(self.counts) + self.passed) * H
        frequency = 1e6 ** (-np.arange(self.half) / self.half)
        angle = rng.integers(0, 30_000, (B, T, 1)) * frequency
        arrays = {
            "x": rng.standard_normal((B, T, width), np.float32) * np.float32(1.5),
            "d_out": rng.standard_normal((B, T, width), np.float32),
            "cos": np.cos(angle).astype(np.float32),
            "sin": np.sin(angle).astype(np.float32),
        }
        if self.normed:
            scales = rng.uniform(0.5, 3.0, (len(self.counts), H))
            arrays["scales"] = scales.astype(np.float32)
        return arrays

    def moved_bytes(self, itemsize: int = 2) -> tuple[int, int]:
        """(forward, backward): every number read once and written once, angles included."""
        tokens, H = self.rows * self.tokens, self.head_dim
        heads, rotated = sum(self.counts) + self.passed, sum(self.counts)
        angles = 2 * 4 * self.half
        forward = 2 * heads * H * itemsize + angles
        backward = (2 * heads + (rotated if self.normed else 0)) * H * itemsize + angles
        return tokens * forward, tokens * backward


CI, BENCH, TUNE = frozenset({"ci"}), frozenset({"bench"}), frozenset({"bench", "tune"})

CASES = [
    Case("qwen3", 2, 64, (4, 2), 2, 128, CI),
    Case("llama", 1, 128, (4, 2), 2, 64, CI, normed=False),
    Case("queries_alone", 1, 64, (3,), 0, 128, CI),
    Case("partial", 1, 64, (4, 2), 2, 128, CI, rotated_dims=64),
    Case("partial_llama", 1, 64, (2, 2), 2, 128, CI, normed=False, rotated_dims=64),
    Case("qwen3_0.6b_t8192", 1, 8192, (16, 8), 8, 128, TUNE),
    Case("qwen3_8b_t8192", 1, 8192, (32, 8), 8, 128, TUNE),
    Case("llama_8b_t8192", 1, 8192, (32, 8), 8, 128, BENCH, normed=False),
    Case("llama_1b_t8192", 1, 8192, (32, 8), 8, 64, TUNE, normed=False),
    Case("qwen3_0.6b_t32768", 1, 32768, (16, 8), 8, 128, BENCH),
]
