"""The gated delta rule of one token a row: the kernel, XLA, flash-linear-attention.

python benchmarks/delta_step.py --out benchmarks/results/delta_step_h200

16 key and 32 value heads of 128 dims, bfloat16, states in float32. A step is timed inside a scan
that hands the state on, as a sampler's loop does. `tb_s` counts the state once read and once
written; `error` is the state's against a float64 recurrence on the host after the first step.
"""

import argparse
import functools
import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtrain_kernels import gated_delta
from jaxtrain_kernels.gated_delta import gpu_decode, xla
from report import Report
from timing import jax_ms, torch_ms

KEY_HEADS, VALUE_HEADS, DIM = 16, 32, 128
STEPS = 32
SWEEP = tuple(itertools.product((16, 32, 64, 128), (2, 4, 8)))
"""(columns, warps)."""


def make_arrays(rows: int):
    """(q, k, v, g, beta, until) of one token a row, and the state."""
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
    """What jax_ms finds, for one of STEPS steps."""

    def steps(state, *arrays):
        def one(state, _):
            out, state = step(*arrays, state)
            return state, out[0, 0, 0, 0]

        return lax.scan(one, state, None, length=STEPS)

    found = jax_ms(steps, state, *arrays)
    return found | {"ms": found["ms"] / STEPS}


def peer(arrays, state):
    """One step of flash-linear-attention's recurrent kernel."""
    import torch
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    def put(x):
        low = torch.bfloat16 if x.dtype == jnp.bfloat16 else torch.float32
        return torch.from_numpy(np.array(x.astype(jnp.float32))).cuda().to(low)

    *inputs, _ = arrays
    q, k, v, g, beta = map(put, inputs)
    first = put(state)

    def run():
        with torch.no_grad():
            return fused_recurrent_gated_delta_rule(
                *(q, k, v, g, beta), scale=1.0, initial_state=first, output_final_state=True
            )

    return run


def find_error(step, arrays, state) -> float:
    """Of the state behind one step, by norm."""
    _, found = jax.jit(step)(*arrays, state)
    q, k, v, g, beta = (np.asarray(x[:, 0].astype(jnp.float32), np.float64) for x in arrays[:5])
    k = np.repeat(k, VALUE_HEADS // KEY_HEADS, axis=1)
    S = np.exp(g)[..., None, None] * np.asarray(state, np.float64)
    delta = beta[..., None] * (v - np.einsum("bnkv,bnk->bnv", S, k))
    S += k[..., None] * delta[:, :, None]
    return float(np.linalg.norm(np.asarray(found) - S) / np.linalg.norm(S))


def measure(step, arrays, state) -> dict:
    return time_steps(step, arrays, state) | {"error": find_error(step, arrays, state)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--impl", nargs="+", default=["gpu_decode", "xla", "fla"])
    parser.add_argument("--sweep", action="store_true", help="sizes of the kernel's programs")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    report = Report(options.out)
    for rows in options.rows:
        arrays, state = make_arrays(rows)
        labels = {"op": "delta_step", "case": f"{rows} rows"}
        timed = functools.partial(report.timed, 2 * state.nbytes)
        steps = {
            "gpu_decode": lambda *a: gated_delta(*a[:6], state=a[6], impl="gpu_decode"),
            "xla": lambda *a: xla.gated_delta(*a[:6], state=a[6]),
        }
        for impl in (one for one in options.impl if one in steps):
            timed(
                functools.partial(measure, steps[impl], arrays, state), "tb_s", **labels, impl=impl
            )
        if options.sweep:
            for columns, warps in SWEEP:
                step = functools.partial(gpu_decode.run, gpu_decode.Config(columns, warps))
                timing = functools.partial(time_steps, step, arrays, state)
                timed(timing, "tb_s", **labels, impl=f"columns{columns}_warps{warps}")
        if "fla" in options.impl:
            timed(functools.partial(torch_ms, peer(arrays, state)), "tb_s", **labels, impl="fla")


if __name__ == "__main__":
    main()
