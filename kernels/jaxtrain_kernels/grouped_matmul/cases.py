"""The shapes of the mixture-of-experts layer: read by benchmarks."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Case:
    """One layer; tokens choose `top` different experts at random."""

    name: str
    tokens: int
    width: int
    hidden: int
    experts: int
    top: int
    tags: frozenset[str]
    """"bench": benchmarks; "tune": autotuning."""

    def inputs(self, seed: int = 0) -> dict[str, np.ndarray]:
        """Arguments of `moe_ffn` and the cotangent `g`, float32 and int32 numpy."""
        rng = np.random.default_rng(seed)
        T, D, F, E = self.tokens, self.width, self.hidden, self.experts
        gates = rng.random((T, self.top), np.float32)
        return {
            "x": rng.standard_normal((T, D), np.float32),
            "experts": np.argsort(rng.random((T, E), np.float32))[:, : self.top].astype(np.int32),
            "gates": gates / gates.sum(-1, keepdims=True),
            "w_gate": rng.standard_normal((E, D, F), np.float32) * np.float32(D**-0.5),
            "w_up": rng.standard_normal((E, D, F), np.float32) * np.float32(D**-0.5),
            "w_down": rng.standard_normal((E, F, D), np.float32) * np.float32(F**-0.5),
            "g": rng.standard_normal((T, D), np.float32),
        }

    def flops(self) -> int:
        """Of the forward's matmuls; the backward has twice as many."""
        return 6 * self.tokens * self.top * self.width * self.hidden


CASES = [
    Case("t8192_e128_top8_2048_768", 8192, 2048, 768, 128, 8, frozenset({"bench", "tune"})),
    Case("t32768_e128_top8_2048_768", 32768, 2048, 768, 128, 8, frozenset({"bench", "tune"})),
    # Widths of gpt-oss-20b and of Gemma 4 26B-A4B, which no tile divides.
    Case("t16384_e32_top4_2880_2880", 16384, 2880, 2880, 32, 4, frozenset({"bench"})),
    Case("t16384_e128_top8_2816_704", 16384, 2816, 704, 128, 8, frozenset({"bench"})),
]
