"""Timing of PyTorch steps: warm-up, CUDA events between queued steps, the allocator's peak."""

import statistics
import time
from collections.abc import Callable

import numpy as np
import torch


def time_calls(function: Callable, count: int, cuda: bool) -> list[float]:
    """Return the seconds of each call, by the device's clock where there is one."""
    if not cuda:
        ends = [time.perf_counter()]
        for _ in range(count):
            function()
            ends.append(time.perf_counter())
        return np.diff(ends).tolist()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        function()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / 1e3 for a, b in zip(events, events[1:], strict=False)]


def warm_up(run: Callable, count: int) -> dict:
    """Return the first and the last loss of `count` steps, and the seconds of the first one."""
    start = time.perf_counter()
    losses = [float(run())]
    compile_s = time.perf_counter() - start
    losses += [float(run()) for _ in range(count - 1)]
    return {"loss": losses[0], "loss_after": losses[-1], "compile_s": compile_s}


def time_steps(run: Callable, count: int, cuda: bool, wait: bool = False) -> dict:
    """Return the seconds of each step and the peak in GiB (0 on a CPU).

    wait: read the loss after every step, so that no two steps are queued at once.
    """
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    step = (lambda: float(run())) if wait else run
    seconds = time_calls(step, count, cuda and not wait)
    peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
    return {"seconds": seconds, "step_s": statistics.median(seconds), "peak_gib": peak}


def measure_steps(run: Callable, warm: int, timed: int, cuda: bool, wait: bool = False) -> dict:
    """Return losses, the seconds of a step (median, least, most) and the allocator's peak."""
    row = warm_up(run, warm) | time_steps(run, timed, cuda, wait)
    seconds = row.pop("seconds")
    return row | {"step_s_min": min(seconds), "step_s_max": max(seconds)}
