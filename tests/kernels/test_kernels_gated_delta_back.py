"""The Hopper kernels of the gradient of gated_delta, interpreted: beside float64 and XLA."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtrain_kernels import testing
from jaxtrain_kernels.gated_delta import mosaic_gpu, reference, xla
from jaxtrain_kernels.gated_delta.cases import Case
from mosaic_interpreter import interpreted

NAMES = ("q", "k", "v", "g", "beta", "state")
FOREST = [(70, -1), (20, 0), (3, 1), (40, 0), (5, -1)]
"""Of chunks of 64, 6, 20 and 40: one that two others follow, and a tree of its own."""


def gradients(function, inputs, state, d_last, dtype, prev):
    """Of q, k, v, g, beta and the state, all as float64 numpy."""
    wide = jnp.promote_types(dtype, jnp.float32)
    given = [jnp.asarray(inputs[n], jnp.bfloat16).astype(dtype) for n in ("q", "k", "v")]
    given += [jnp.asarray(inputs[n], wide) for n in ("g", "beta")]
    given.append(jnp.asarray(state, wide))
    d_out = jnp.asarray(inputs["d_out"], jnp.bfloat16).astype(dtype)
    until = jnp.asarray(inputs["until"])

    def run(*arrays):
        out, last = function(*arrays[:5], until, prev, arrays[5])
        return out if prev is not None else (out, last)

    _, pull = jax.vjp(run, *given)
    found = pull(d_out if prev is not None else (d_out, jnp.asarray(d_last, wide)))
    return [np.asarray(x, np.float64) for x in found]


def by(module):
    return lambda *arrays: module.gated_delta(*arrays[:7], state=arrays[7])


@pytest.mark.parametrize(
    ("gates", "chain"),
    [
        ("slow", False),
        pytest.param("init", False, marks=pytest.mark.slow),
        pytest.param("hard", False, marks=pytest.mark.slow),
        pytest.param("slow", True, marks=pytest.mark.slow),
    ],
)
def test_interpreted_gradients(gates, chain):
    """By the 2x rule beside XLA's, no data race; a chain ends inside of a chunk, and something is
    owed to its last state."""
    case = Case("", lambda: FOREST, 160, 1, 2, 128, 128, frozenset(), gates=gates)
    inputs = case.inputs()
    prev = jnp.asarray(inputs["prev"])
    if chain:
        prev = None
        inputs["until"] = np.where(np.arange(160) < 138, 138, 0)[None].astype(np.int32)
    rng = np.random.default_rng(1)
    state, d_last = (0.1 * rng.standard_normal((1, 2, 128, 128)) for _ in range(2))
    options = mosaic_gpu.Options(chain, 1)
    run = functools.partial(gradients, inputs=inputs, state=state, d_last=d_last, prev=prev)
    with interpreted(detect_races=True):
        found = run(functools.partial(mosaic_gpu.run, options), dtype=jnp.bfloat16)
    plain = run(by(xla), dtype=jnp.bfloat16)
    with jax.enable_x64(True):
        exact = run(by(reference), dtype=jnp.float64)
    for name, a, b, c in zip(NAMES, found, exact, plain, strict=True):
        testing.assert_accurate(a, b, c, "bfloat16", name)
        norm = np.linalg.norm
        testing.assert_accurate(a, b, c, "bfloat16", name, norm=norm)
