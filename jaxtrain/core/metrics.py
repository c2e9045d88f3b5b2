"""Numbers about a run: averages that add up, throughput, model FLOP utilization and memory."""

from dataclasses import dataclass

import numpy as np

from jaxtrain.batch import Batch

Pair = tuple[float, float]

PEAK_TFLOPS_BF16 = {
    "H200": 989.0,
    "H100": 989.0,
    "H800": 989.0,
    "B200": 2250.0,
    "A100": 312.0,
    "L40S": 362.0,
    "L40": 181.0,  # before L4, which is a part of its name, as it is of L40S
    "L4": 121.0,
    "TPU v4": 275.0,
    "TPU v5 lite": 197.0,
    "TPU v5e": 197.0,
    "TPU v5p": 459.0,
    "TPU v5": 459.0,
    "TPU v6 lite": 918.0,
    "TPU v6e": 918.0,
}
"""Dense bf16 peaks from the vendors' data sheets, by a part of jax's device_kind."""


def peak_flops(device_kind: str, compute_dtype: str, override_tflops: float | None) -> float | None:
    """Peak FLOP/s of one device in the compute dtype, or None where it is not known."""
    if override_tflops:
        return override_tflops * 1e12
    if compute_dtype != "bfloat16":
        return None
    for name, tflops in PEAK_TFLOPS_BF16.items():
        if name.lower() in device_kind.lower():
            return tflops * 1e12
    return None


def average(pairs: dict[str, Pair]) -> dict[str, float]:
    """Means of (sum, weight) pairs; a metric without weight is left out."""
    return {name: total / weight for name, (total, weight) in pairs.items() if weight}


def add_pairs(first: dict[str, Pair], second: dict[str, Pair]) -> dict[str, Pair]:
    """Add two sets of (sum, weight) pairs by name."""
    summed = dict(first)
    for name, (total, weight) in second.items():
        before = summed.get(name, (0.0, 0.0))
        summed[name] = (before[0] + total, before[1] + weight)
    return summed


@dataclass
class Throughput:
    """Tokens per second and MFU between two readings of the clock."""

    num_devices: int
    peak_flops: float | None
    """FLOP/s of one device; None leaves MFU out."""
    last_time: float | None = None

    def read(self, end_time: float, tokens: float, flops: float) -> dict[str, float]:
        """Return rates of the step that ended at `end_time` (seconds) with `tokens` and model
        `flops`."""
        previous, self.last_time = self.last_time, end_time
        if previous is None or end_time <= previous:
            return {}
        seconds = end_time - previous
        rates = {
            "step_seconds": seconds,
            "tokens_per_second_per_device": tokens / seconds / self.num_devices,
        }
        if self.peak_flops:
            rates["mfu"] = flops / seconds / (self.peak_flops * self.num_devices)
        return rates


def model_flops(matmul_params: float, tokens: float, mixing: float) -> float:
    """FLOPs that one training step needs, recomputation not counted.

    6 per weight that multiplies a token (the output head counts, the embedding table does not) and
    3 times the cost of mixing tokens in a forward pass, by the layers: attention 4 per visible
    (query, key) pair, head and dim, a tree's shared tokens once. PaLM's MFU (arXiv 2204.02311) with
    the mask accounted for.
    """
    return 6.0 * matmul_params * tokens + 3.0 * mixing


def count_work(batch: Batch) -> tuple[int, np.ndarray]:
    """Count the tokens of a host Batch that are not padding, and for each of them the tokens that
    see it."""
    until = np.asarray(batch.until)
    index = np.arange(until.shape[-1])
    real = (np.asarray(batch.prev) >= 0) | (until > index + 1)
    spans = until - (index if batch.since is None else np.asarray(batch.since))
    return int(real.sum()), spans[real]
