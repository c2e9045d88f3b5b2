"""The shapes of logp_of_logits: read by tests, benchmarks and autotuning."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Case:
    """One problem; logits have a standard deviation of `spread`."""

    name: str
    tokens: int
    vocabulary: int
    tags: frozenset[str]
    """"ci": tests; "bench": benchmarks; "tune": autotuning."""
    spread: float = 2.0
    per_token_temperature: bool = False

    def inputs(self, seed: int = 0) -> dict[str, np.ndarray]:
        """`logits`, `targets`, maybe `temperature`, and cotangents `g` float32 [3, T]."""
        rng = np.random.default_rng(seed)
        T, V = self.tokens, self.vocabulary
        arrays = {
            "logits": rng.standard_normal((T, V), np.float32) * np.float32(self.spread),
            "targets": rng.integers(0, V, T, np.int32),
            "g": rng.standard_normal((3, T), np.float32),
        }
        if self.per_token_temperature:
            arrays["temperature"] = rng.uniform(0.5, 2.0, T).astype(np.float32)
        return arrays


CI, BENCH, TUNE = frozenset({"ci"}), frozenset({"bench"}), frozenset({"bench", "tune"})

CASES = [
    Case("plain", 40, 512, CI),
    Case("odd_vocabulary", 33, 509, CI),
    Case("wide", 20, 500, CI, spread=20.0),
    Case("temperature", 40, 384, CI, per_token_temperature=True),
    Case("t4096_v151936", 4096, 151936, TUNE),
    Case("t8192_v32000", 8192, 32000, TUNE),
]
