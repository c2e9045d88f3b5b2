"""The gated delta rule's kernels: errors by norm, time by GPU kernel, steps of one token a row.

    python benchmarks/delta.py errors [--gates slow] > errors.json
    python benchmarks/delta.py parts [--cases one8k_h16_32 tree8k_h16_32] [--out parts.json]
    python benchmarks/delta.py step --out benchmarks/results/delta_step_h200

errors  Hopper kernels and XLA in bfloat16 against XLA in float32: outputs and gradients on a tree
        and on packed documents, with 4 key and 8 value heads, for each kind of gates; and whether
        two runs give the same bits.
parts   Microseconds of a call by GPU kernel, from a profile: `call` is the time of many calls that
        are queued together, then come the longest kernels, the others, and `waits`, the time in
        which no kernel ran. "forward" gets packed rows and `chunks=`, as from a model; "forward,
        finds" finds the chunks itself; "backward" uses the forward's; "chain, forward" is without
        prev, for cases of one document; "find" is `find_chunks`, once for all layers of a model.
step    One token a row by the kernel, XLA and flash-linear-attention: 16 key and 32 value heads of
        128 dims, bfloat16, states in float32, inside a scan that passes the state on, as in a
        sampler's loop. `tb_s` counts the state read once and written once; `error` is the state's
        after one step, against a float64 recurrence on the host.
"""

import argparse
import collections
import functools
import itertools
import json
import re
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from gpu_profile import read_events
from harness import Report, jax_ms, torch_ms
from jax import lax
from jaxtrain_kernels import gated_delta, testing
from jaxtrain_kernels.gated_delta import find_chunks, gpu_decode, xla
from jaxtrain_kernels.gated_delta.cases import CASES, Case
from kernel_ops import GatedDelta, backward_program

CALLS, LONGEST = 5, 7
KEY_HEADS, VALUE_HEADS, DIM, STEPS = 16, 32, 128, 32
SWEEP = tuple(itertools.product((16, 32, 64, 128), (2, 4, 8)))
"""(columns, warps) of the decode kernel."""
FORESTS = {
    "tree": functools.partial(testing.agent_tree, 4, 1024 // 6, 1024 // 20),
    "documents": functools.partial(testing.documents, [333, 64, 5, 200, 1, 130, 90, 199]),
}


@functools.partial(jax.jit, static_argnums=(0, 1))
def run_rule(impl, dtype, low, gates, until, prev):
    """Return out and the gradients."""
    q, k, v, d_out = (x.astype(dtype) for x in low)

    def function(*arrays):
        return gated_delta(*arrays, until, prev, impl=impl)[0]

    out, pull = jax.vjp(function, q, k, v, *gates)
    return out, *pull(d_out)


def compare_norms(forest: str, gates: str) -> dict:
    """Return relative errors by name: [of the kernels, of XLA in bfloat16]."""
    case = Case("", FORESTS[forest], 1024, 4, 8, 128, 128, frozenset(), gates=gates)
    inputs = case.inputs()
    context = [jnp.asarray(inputs[n]) for n in ("until", "prev")]
    low = [jnp.asarray(inputs[n], jnp.bfloat16) for n in ("q", "k", "v", "d_out")]
    gate_arrays = [jnp.asarray(inputs[n]) for n in ("g", "beta")]
    kernel = ("mosaic_gpu", jnp.bfloat16)
    exact, plain, actual, again = (
        [np.asarray(x, np.float64) for x in run_rule(impl, dtype, low, gate_arrays, *context)]
        for impl, dtype in (("xla", jnp.float32), ("xla", jnp.bfloat16), kernel, kernel)
    )
    norm = np.linalg.norm
    table = {
        name: [float(norm(x - e) / norm(e)) for x in (a, p)]
        for name, a, p, e in zip(("out", *GatedDelta.inputs), actual, plain, exact, strict=True)
    }
    same = all((a == b).all() for a, b in zip(actual, again, strict=True))
    return table | {"same bits twice": same}


def report_errors(options) -> None:
    table: dict = {"device": jax.devices()[0].device_kind}
    for forest, gates in itertools.product(FORESTS, options.gates):
        key = f"{forest}, {gates}"
        table[key] = compare_norms(forest, gates)
        print(forest, gates, table[key], file=sys.stderr, flush=True)
    print(json.dumps(table, indent=1))


def make_steps(case) -> dict[str, tuple]:
    """Return {name of the step: (function, arguments)}."""
    op = GatedDelta(case)
    inputs, rows = op.operands(), op.context
    chunks = jax.jit(find_chunks)(*rows)

    def forward(inputs, rows, chunks=None):
        return gated_delta(*inputs, *rows, chunks=chunks, impl="mosaic_gpu")[0]

    call = lambda *inputs: forward(inputs, rows, chunks)  # noqa: E731
    steps = {
        "find": (find_chunks, rows),
        "forward": (forward, (inputs, rows, chunks)),
        "forward, finds": (forward, (inputs, rows)),
        "backward": backward_program(call, inputs, op.arrays["d_out"]),
    }
    if len(case.forest()) == 1:
        steps["chain, forward"] = (forward, (inputs, rows[:1]))
    return steps


def profile(function, arguments) -> dict[str, tuple[float, float]]:
    """Return {kernel: (microseconds, launches) a call}, the longest first."""
    compiled = jax.jit(function)
    jax.block_until_ready(compiled(*arguments))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(CALLS):
                output = compiled(*arguments)
            jax.block_until_ready(output)
        events = read_events(Path(folder))
    spent, launches = collections.Counter(), collections.Counter()
    for event in events:
        name = re.sub("_mosaic_gpu_kernel|^gated_delta_", "", event["name"])
        spent[name] += event["dur"] / CALLS
        launches[name] += 1 / CALLS
    return {name: (duration, launches[name]) for name, duration in spent.most_common()}


def measure_parts(function, arguments) -> dict:
    """Return the cells of one line of `parts`."""
    timing = jax_ms(function, *arguments)
    kernels, call = profile(function, arguments), 1e3 * timing["ms"]
    durations = [duration for duration, _ in kernels.values()]
    return {
        "call": call,
        **dict(zip(list(kernels)[:LONGEST], durations, strict=False)),
        "others": sum(durations[LONGEST:]),
        "launches": sum(count for _, count in kernels.values()),
        "waits": call - sum(durations),
        "temp_mib": timing["temp_mib"],
    }


def report_parts(options) -> None:
    report = Report(options.out)
    for case in (case for case in CASES if case.name in options.cases):
        for name, step in make_steps(case).items():
            if options.steps is None or name in options.steps:
                report.add(case=case.name, step=name, **measure_parts(*step))


def make_token(rows: int) -> tuple[tuple, jax.Array]:
    """Return (q, k, v, g, beta, until) of one token a row, and the state."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.standard_normal((rows, *shape), np.float32)

    q, k = (normal(1, KEY_HEADS, DIM) * np.float32(DIM**-0.5) for _ in range(2))
    low = [jnp.asarray(x, jnp.bfloat16) for x in (q, k, normal(1, VALUE_HEADS, DIM))]
    g, beta = -0.01 * abs(normal(1, VALUE_HEADS)), 1 / (1 + np.exp(-normal(1, VALUE_HEADS)))
    until = jnp.ones((rows, 1), jnp.int32)
    state = jnp.asarray(normal(VALUE_HEADS, DIM, DIM))
    return (*low, jnp.asarray(g), jnp.asarray(beta, jnp.float32), until), state


def time_steps(step, arrays, state) -> dict:
    """Return the cells of jax_ms for one of STEPS steps."""

    def steps(state, *arrays):
        def body(state, _):
            out, state = step(*arrays, state)
            return state, out[0, 0, 0, 0]

        return lax.scan(body, state, None, length=STEPS)

    return jax_ms(steps, state, *arrays, repeats=STEPS)


def state_error(step, arrays, state) -> float:
    """Return the relative error of the state after one step, by norm."""
    _, actual = jax.jit(step)(*arrays, state)
    q, k, v, g, beta = (np.asarray(x[:, 0].astype(jnp.float32), np.float64) for x in arrays[:5])
    k = np.repeat(k, VALUE_HEADS // KEY_HEADS, axis=1)
    S = np.exp(g)[..., None, None] * np.asarray(state, np.float64)
    delta = beta[..., None] * (v - np.einsum("bnkv,bnk->bnv", S, k))
    S += k[..., None] * delta[:, :, None]
    return float(np.linalg.norm(np.asarray(actual) - S) / np.linalg.norm(S))


def report_steps(options) -> None:
    report = Report(options.out)
    steps = {
        "gpu_decode": lambda *a: gated_delta(*a[:6], state=a[6], impl="gpu_decode"),
        "xla": lambda *a: xla.gated_delta(*a[:6], state=a[6]),
    }
    for rows in options.rows:
        arrays, state = make_token(rows)

        def add(impl, measure, size=2 * state.nbytes, rows=rows):
            report.timed(size, measure, "tb_s", op="delta_step", case=f"{rows} rows", impl=impl)

        for impl, step in steps.items():
            if impl in options.impl:
                arguments = (step, arrays, state)
                add(impl, lambda a=arguments: time_steps(*a) | {"error": state_error(*a)})
        for columns, warps in SWEEP if options.sweep else ():
            step = functools.partial(gpu_decode.run, gpu_decode.Config(columns, warps))
            timing = functools.partial(time_steps, step, arrays, state)
            add(f"columns{columns}_warps{warps}", timing)
        if "fla" in options.impl:
            from peers.kernel_ops import gated_delta_step

            add("fla", functools.partial(torch_ms, gated_delta_step(arrays[:5], state)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = parser.add_subparsers(dest="part", required=True)
    errors = parts.add_parser("errors", help="against float32 maths")
    errors.add_argument("--gates", nargs="*", default=["slow", "init", "hard"])
    kernels = parts.add_parser("parts", help="time by GPU kernel")
    kernels.add_argument("--cases", nargs="*", default=["one8k_h16_32", "tree8k_h16_32"])
    kernels.add_argument("--steps", nargs="*", help="instead of all")
    kernels.add_argument("--out", type=Path)
    step = parts.add_parser("step", help="one token a row")
    step.add_argument("--rows", type=int, nargs="+", default=[16, 64, 256])
    step.add_argument("--impl", nargs="+", default=["gpu_decode", "xla", "fla"])
    step.add_argument("--sweep", action="store_true", help="sizes of the kernel's programs")
    step.add_argument("--out", type=Path)
    options = parser.parse_args()
    run = {"errors": report_errors, "parts": report_parts, "step": report_steps}
    run[options.part](options)


if __name__ == "__main__":
    main()
