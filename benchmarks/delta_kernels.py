"""The Hopper kernels of gated_delta one by one: errors beside XLA, then times.

    python benchmarks/delta_kernels.py [--seconds 200] > $OUT/delta_kernels.json

Errors are those of outputs and gradients beside XLA in float32, by norm; beside them those of XLA
in bfloat16, on a tree with 4 key and 8 value heads. Times are of single kernels on the shapes of
`gated_delta.cases`, "bench".
"""

import argparse
import functools
import json
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jaxtrain_kernels import testing
from jaxtrain_kernels.gated_delta import (
    gated_delta,
    gpu_gradients,
    gpu_order,
    gpu_walk_back,
)
from jaxtrain_kernels.gated_delta.cases import CASES, Case
from timing import jax_ms

NAMES = ("out", "q", "k", "v", "g", "beta")


@functools.partial(jax.jit, static_argnums=(0, 1))
def run(impl, dtype, low, gates, until, prev):
    """out and the gradients."""
    q, k, v, d_out = (x.astype(dtype) for x in low)

    def function(*arrays):
        return gated_delta(*arrays, until, prev, impl=impl)[0]

    out, pull = jax.vjp(function, q, k, v, *gates)
    return out, *pull(d_out)


def errors(gates: str, tokens: int = 1024, heads=(4, 8)) -> dict[str, list[float]]:
    """By name: [of the kernels, of XLA in bfloat16]."""
    tree = functools.partial(testing.agent_tree, 4, tokens // 6, tokens // 20)
    case = Case("", tree, tokens, *heads, 128, 128, frozenset(), gates=gates)
    inputs = case.inputs()
    context = [jnp.asarray(inputs[n]) for n in ("until", "prev")]
    low = [jnp.asarray(inputs[n], jnp.bfloat16) for n in ("q", "k", "v", "d_out")]
    rest = [jnp.asarray(inputs[n]) for n in ("g", "beta")]
    exact, plain, mine, again = (
        [np.asarray(x, np.float64) for x in run(impl, dtype, low, rest, *context)]
        for impl, dtype in (
            ("xla", jnp.float32),
            ("xla", jnp.bfloat16),
            ("mosaic_gpu", jnp.bfloat16),
            ("mosaic_gpu", jnp.bfloat16),
        )
    )
    same = all((a == b).all() for a, b in zip(mine, again, strict=True))
    norm = np.linalg.norm
    table = {
        name: [float(norm(x - e) / norm(e)) for x in (a, p)]
        for name, a, p, e in zip(NAMES, mine, plain, exact, strict=True)
    }
    return table | {"same bits twice": same}


def times(case: Case) -> dict[str, float]:
    """Milliseconds of each kernel. Contents are made up, the chunks are the case's."""
    forest = case.forest()
    row = testing.pack(forest, case.tokens)
    used = np.arange(case.tokens) < sum(size for size, _ in forest)
    until = jnp.asarray(np.where(used, row["until"], 0), jnp.int32)[None]
    prev = jnp.asarray(row["prev"], jnp.int32)[None]
    chain = len(forest) == 1
    links, slots = gpu_order.order_rows(None if chain else prev, until, 1)
    B, n = links.start.shape
    H, N, K, V = case.key_heads, case.value_heads, case.key_dim, case.value_dim
    key = jax.random.key(0)

    def made(*shape, scale=0.05):
        return (scale * jax.random.normal(key, shape)).astype(jnp.bfloat16)

    q, k, v, d_out = (made(B, n * 64, heads, 128) for heads in (H, H, N, N))
    beta = jnp.full((B, n, N, 64), 0.5, jnp.float32)
    G = jnp.broadcast_to(-0.01 * jnp.arange(64.0), beta.shape)
    T = P = made(B, n, N, 64, 64)
    ordered = gpu_order.Ordered(q, k, v, beta, G, T, P)
    S, d_x = made(B, n, N, V, K), made(B, n, N, V, 64)

    def back(links, ordered, d_out):
        return gpu_walk_back.walk_back(links, ordered, d_out, None, slots)

    found = {"chunks": int(links.total[0])}
    for name, function, arrays in (
        ("walk_back", back, (links, ordered, d_out)),
        ("gradients", gpu_gradients.gradients, (links, ordered, S, v, d_out, d_x, S)),
    ):
        found[name] = round(jax_ms(function, *arrays)["ms"], 4)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=200.0, help="stop behind so many")
    parser.add_argument("--cases", default="one8k_h16_32,tree8k_h16_32,one32k_h16_32")
    parser.add_argument("--errors", default="slow,init,hard")
    options = parser.parse_args()
    start, found = time.monotonic(), {"device": jax.devices()[0].device_kind}
    chosen = [c for c in CASES if c.name in options.cases.split(",")]
    gates = [g for g in options.errors.split(",") if g]
    jobs = [(f"errors {g}", functools.partial(errors, g)) for g in gates]
    jobs += [(f"times {c.name}", functools.partial(times, c)) for c in chosen]
    for name, job in jobs:
        if time.monotonic() - start > options.seconds:
            break
        try:
            found[name] = job()
        except Exception as e:  # one that fails does not hide the others
            found[name] = f"{type(e).__name__}: {e}"[:2000]
        print(name, found[name], file=sys.stderr, flush=True)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
