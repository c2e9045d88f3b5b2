"""The shapes of the mixture-of-experts layer: read by benchmarks."""

from dataclasses import dataclass

import numpy as np

from jaxtrain_kernels.grouped_matmul.ffn import Activation, Clamped


@dataclass(frozen=True)
class Case:
    """A layer; tokens choose `top` different experts at random."""

    name: str
    tokens: int
    width: int
    hidden: int
    experts: int
    top: int
    tags: frozenset[str]
    """"bench": benchmarks; "tune": autotuning."""
    activation: Activation = "silu"
    gated: bool = True
    biased: bool = False
    """Biases behind all matrices."""

    def inputs(self, seed: int = 0) -> dict[str, np.ndarray]:
        """Arguments of `moe_ffn` and the cotangent `g`, float32 and int32 numpy."""
        rng = np.random.default_rng(seed)
        T, D, F, E = self.tokens, self.width, self.hidden, self.experts
        gates = rng.random((T, self.top), np.float32)
        arrays = {
            "x": rng.standard_normal((T, D), np.float32),
            "experts": np.argsort(rng.random((T, E), np.float32))[:, : self.top].astype(np.int32),
            "gates": gates / gates.sum(-1, keepdims=True),
            "w_gate": rng.standard_normal((E, D, F), np.float32) * np.float32(D**-0.5),
            "w_up": rng.standard_normal((E, D, F), np.float32) * np.float32(D**-0.5),
            "w_down": rng.standard_normal((E, F, D), np.float32) * np.float32(F**-0.5),
            "g": rng.standard_normal((T, D), np.float32),
        }
        if not self.gated:
            del arrays["w_gate"]
        if self.biased:
            sizes = {"b_gate": F, "b_up": F, "b_down": D}
            arrays |= {n: rng.standard_normal((E, s), np.float32) for n, s in sizes.items()}
        return arrays

    def flops(self) -> int:
        """FLOPs of the forward's matmuls; the backward has twice as many."""
        matrices = 3 if self.gated else 2
        return 2 * matrices * self.tokens * self.top * self.width * self.hidden


BENCH, TUNE = frozenset({"bench"}), frozenset({"bench", "tune"})

CASES = [
    Case("t8192_e128_top8_2048_768", 8192, 2048, 768, 128, 8, TUNE),
    Case("t32768_e128_top8_2048_768", 32768, 2048, 768, 128, 8, TUNE),
    # Widths of gpt-oss-20b and of Gemma 4 26B-A4B, which no tile divides.
    Case("t16384_e32_top4_2880_2880", 16384, 2880, 2880, 32, 4, BENCH),
    Case("t16384_e128_top8_2816_704", 16384, 2816, 704, 128, 8, BENCH),
    # All of gpt-oss-20b's layer, of Nemotron 3 Nano's and of DeepSeek-V2-Lite's.
    Case("gpt_oss", 16384, 2880, 2880, 32, 4, BENCH, activation=Clamped(), biased=True),
    Case("nemotron", 16384, 2688, 1856, 128, 6, BENCH, activation="relu2", gated=False),
    Case("deepseek_v2", 16384, 2048, 1408, 64, 6, BENCH),
]
