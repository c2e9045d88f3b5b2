"""Where a call of gated_delta's Hopper backend spends its time: its GPU kernels, from a profile.

    python benchmarks/delta_parts.py [--cases one8k_h16_32 tree8k_h16_32] [--out parts.json]

A line for each case and step, microseconds a call: `call` the time of many calls queued together,
then the longest kernels, the others, and `waits`, the rest, in which no kernel ran. Steps:

    find            `find_chunks`, which a model does once for all layers
    forward         packed rows, with `chunks=` as a model hands them over
    forward, finds  the same, finding the chunks itself
    backward        of packed rows; their chunks are the forward's
    chain, forward  without prev, for cases of one document
"""

import argparse
import collections
import re
import tempfile
from pathlib import Path

import jax
from delta import INPUTS, low_inputs
from gpu_profile import read_events
from jaxtrain_kernels.gated_delta import find_chunks, gated_delta
from jaxtrain_kernels.gated_delta.cases import CASES
from report import Report
from timing import jax_ms

CALLS, LONGEST = 5, 7


def make_steps(case) -> dict:
    """{name of the step: (function, arguments)}."""
    arrays = low_inputs(case)
    inputs = [arrays[name] for name in INPUTS]
    rows = arrays["until"], arrays["prev"]
    chunks = jax.jit(find_chunks)(*rows)

    def forward(inputs, rows, chunks=None):
        return gated_delta(*inputs, *rows, chunks=chunks, impl="mosaic_gpu")[0]

    def backward(pull, d_out):
        return pull(d_out)

    _, pull = jax.vjp(jax.jit(lambda *inputs: forward(inputs, rows, chunks)), *inputs)
    steps = {
        "find": (find_chunks, rows),
        "forward": (forward, (inputs, rows, chunks)),
        "forward, finds": (forward, (inputs, rows)),
        "backward": (backward, (pull, arrays["d_out"])),
    }
    if len(case.forest()) == 1:
        steps["chain, forward"] = (forward, (inputs, rows[:1]))
    return steps


def profile(function, arguments) -> dict[str, tuple[float, float]]:
    """{kernel: (microseconds, launches) a call}, the longest first."""
    compiled = jax.jit(function)
    jax.block_until_ready(compiled(*arguments))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(CALLS):
                found = compiled(*arguments)
            jax.block_until_ready(found)
        events = read_events(Path(folder))
    spent, launches = collections.Counter(), collections.Counter()
    for event in events:
        name = re.sub("_mosaic_gpu_kernel|^gated_delta_", "", event["name"])
        spent[name] += event["dur"] / CALLS
        launches[name] += 1 / CALLS
    return {name: (time, launches[name]) for name, time in spent.most_common()}


def measure(step) -> dict:
    """Of one line; see above."""
    found = jax_ms(*step[:1], *step[1])
    kernels, call = profile(*step), 1e3 * found["ms"]
    others = list(kernels.values())[LONGEST:]
    busy = sum(time for time, _ in kernels.values())
    return {
        "call": call,
        **{name: time for name, (time, _) in list(kernels.items())[:LONGEST]},
        "others": sum(time for time, _ in others),
        "launches": sum(count for _, count in kernels.values()),
        "waits": call - busy,
        "temp_mib": found["temp_mib"],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", nargs="*", default=["one8k_h16_32", "tree8k_h16_32"])
    parser.add_argument("--steps", nargs="*", help="instead of all")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    report = Report(options.out)
    for case in (case for case in CASES if case.name in options.cases):
        for name, step in make_steps(case).items():
            if options.steps is None or name in options.steps:
                report.add(case=case.name, step=name, **measure(step))


if __name__ == "__main__":
    main()
