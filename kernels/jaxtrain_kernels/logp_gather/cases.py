"""The shapes of logp_gather: read by tests, benchmarks and autotuning."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Case:
    """A log-probability problem; logits have a standard deviation of about `spread`."""

    name: str
    tokens: int
    width: int
    vocabulary: int
    tags: frozenset[str]
    """"ci": tests; "bench": benchmarks; "tune": autotuning."""
    spread: float = 2.0
    softcap: float | None = None
    per_token_temperature: bool = False
    freeze_head: bool = False

    def inputs(self, seed: int = 0) -> dict[str, np.ndarray]:
        """`hidden`, `head`, `targets`, maybe `temperature`, and cotangents `g` float32 [3, T]."""
        rng = np.random.default_rng(seed)
        T, D, V = self.tokens, self.width, self.vocabulary
        arrays = {
            "hidden": rng.standard_normal((T, D), np.float32),
            "head": rng.standard_normal((V, D), np.float32) * np.float32(self.spread * D**-0.5),
            "targets": rng.integers(0, V, T, np.int32),
            "g": rng.standard_normal((3, T), np.float32),
        }
        if self.per_token_temperature:
            arrays["temperature"] = rng.uniform(0.5, 2.0, T).astype(np.float32)
        return arrays


CI, BENCH, TUNE = frozenset({"ci"}), frozenset({"bench"}), frozenset({"bench", "tune"})

CASES = [
    Case("plain", 40, 32, 512, CI),
    Case("odd_vocabulary", 33, 32, 509, CI),
    Case("softcap", 40, 32, 384, CI, softcap=3.0),
    Case("temperature", 40, 32, 384, CI, per_token_temperature=True),
    Case("everything", 40, 32, 500, CI, softcap=3.0, per_token_temperature=True),
    Case("frozen", 40, 32, 384, CI, freeze_head=True),
    # Widths of 4 n + 1 blocks of 64: the last block shares its buffer with the next tile's first.
    Case("t1024_d576_v49152", 1024, 576, 49152, BENCH),
    Case("t1024_d2880_v65536", 1024, 2880, 65536, BENCH),
    Case("t8192_d1024_v151936", 8192, 1024, 151936, TUNE),
    Case("t16384_d4096_v151936", 16384, 4096, 151936, TUNE),
]
