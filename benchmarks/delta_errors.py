"""Errors of gated_delta's Hopper kernels beside XLA in float32, by norm.

    python benchmarks/delta_errors.py [--gates slow] > errors.json

Of outputs and gradients on a tree and on packed documents, with 4 key and 8 value heads, for each
kind of gates; beside them those of XLA in bfloat16, and whether two runs give the same bits.
"""

import argparse
import functools
import itertools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jaxtrain_kernels import testing
from jaxtrain_kernels.gated_delta import gated_delta
from jaxtrain_kernels.gated_delta.cases import Case

TOKENS, HEADS = 1024, (4, 8)
NAMES = ("out", "q", "k", "v", "g", "beta")


@functools.partial(jax.jit, static_argnums=(0, 1))
def run(impl, dtype, low, gates, until, prev):
    """out and the gradients."""
    q, k, v, d_out = (x.astype(dtype) for x in low)

    def function(*arrays):
        return gated_delta(*arrays, until, prev, impl=impl)[0]

    out, pull = jax.vjp(function, q, k, v, *gates)
    return out, *pull(d_out)


FORESTS = {
    "tree": functools.partial(testing.agent_tree, 4, TOKENS // 6, TOKENS // 20),
    "documents": functools.partial(testing.documents, [333, 64, 5, 200, 1, 130, 90, 199]),
}


def errors(forest: str, gates: str) -> dict[str, list[float]]:
    """By name: [of the kernels, of XLA in bfloat16]."""
    case = Case("", FORESTS[forest], TOKENS, *HEADS, 128, 128, frozenset(), gates=gates)
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


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gates", nargs="*", default=["slow", "init", "hard"])
    options = parser.parse_args()
    found = {"device": jax.devices()[0].device_kind}
    for forest, gates in itertools.product(FORESTS, options.gates):
        found[f"{forest}, {gates}"] = errors(forest, gates)
        print(forest, gates, found[f"{forest}, {gates}"], file=sys.stderr, flush=True)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
