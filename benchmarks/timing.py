"""Timing on a GPU, the same way for jax and PyTorch: many launches, one wait, the median.

Launches are asynchronous, so for kernels of 50 us and more the queue never runs dry and the time
per launch is device time without dispatch overhead.
"""

import statistics
import time

GROUPS = 5  # timed groups; their median counts


def jax_ms(function, *arguments, budget_s: float = 0.25) -> dict:
    """{"ms", "compile_s", "temp_mib"} of a jitted function of arrays."""
    import jax

    start = time.perf_counter()
    compiled = jax.jit(function).lower(*arguments).compile()
    compile_s = time.perf_counter() - start

    def group(count):
        start = time.perf_counter()
        for _ in range(count):
            result = compiled(*arguments)
        jax.block_until_ready(result)
        return (time.perf_counter() - start) / count

    temp = compiled.memory_analysis().temp_size_in_bytes
    return {"ms": _median_ms(group, budget_s), "compile_s": compile_s, "temp_mib": temp / 2**20}


def torch_ms(function, budget_s: float = 0.25) -> dict:
    """{"ms", "compile_s", "temp_mib"} of a PyTorch callable without arguments."""
    import torch

    torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    torch.cuda.synchronize()
    compile_s = time.perf_counter() - start
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function()
    torch.cuda.synchronize()
    temp = torch.cuda.max_memory_allocated() - before

    def group(count):
        start = time.perf_counter()
        for _ in range(count):
            function()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / count

    return {"ms": _median_ms(group, budget_s), "compile_s": compile_s, "temp_mib": temp / 2**20}


def _median_ms(group, budget_s):
    group(2)  # warm up
    count = max(3, min(100, int(budget_s / GROUPS / max(group(2), 1e-6))))
    return statistics.median(group(count) for _ in range(GROUPS)) * 1e3
