"""The Hopper kernels of gated_delta forward, interpreted: beside float64 and XLA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtrain_kernels import testing
from jaxtrain_kernels.gated_delta import gpu_windows, mosaic_gpu, reference, xla
from jaxtrain_kernels.gated_delta.cases import Case
from mosaic_interpreter import interpreted

FOREST = [(70, -1), (20, 0), (3, 1), (40, 0), (5, -1), (9, -1)]
"""Of chunks of 64, 6, 20 and 40: one that two others follow, and two trees of their own."""
T = 160
ORDERS = {
    "tree": (FOREST, False, 1),
    "two lists": (FOREST, False, 2),
    "chain": ([(138, -1)], True, 1),  # ends inside of a chunk
}


def draw(order, gates):
    """(arguments of gated_delta as float32, options of the kernels)."""
    forest, chain, lanes = ORDERS[order]
    inputs = Case("", lambda: forest, T, 1, 2, 128, 128, frozenset(), gates=gates).inputs()
    if chain:
        inputs["until"] = np.where(np.arange(T) < 138, T, 0)[None].astype(np.int32)
    inputs["prev"] = None if chain else inputs["prev"]
    inputs["state"] = 0.1 * np.random.default_rng(1).standard_normal((1, 2, 128, 128))
    return inputs, mosaic_gpu.Options(chain, lanes)


def run(function, inputs, dtype):
    """(o, the state behind a chain) in float64 numpy, of operands that bfloat16 knows."""
    wide = jnp.promote_types(dtype, jnp.float32)
    low = (jnp.asarray(inputs[n], jnp.bfloat16).astype(dtype) for n in ("q", "k", "v"))
    high = (jnp.asarray(inputs[n], wide) for n in ("g", "beta"))
    prev = None if inputs["prev"] is None else jnp.asarray(inputs["prev"])
    state = jnp.asarray(inputs["state"], wide)
    actual = function(*low, *high, jnp.asarray(inputs["until"]), prev, state)
    return [np.asarray(x, np.float64) for x in actual if x is not None]


def by(module):
    return lambda *arrays: module.gated_delta(*arrays[:7], state=arrays[7])


@pytest.mark.parametrize(
    ("order", "gates"),
    [
        ("tree", "slow"),
        pytest.param("two lists", "init", marks=pytest.mark.slow),
        pytest.param("tree", "hard", marks=pytest.mark.slow),
        pytest.param("chain", "init", marks=pytest.mark.slow),
    ],
)
def test_interpreted_outputs(order, gates):
    """By the 2x rule beside XLA's; no data race; zeros where there is no token."""
    inputs, options = draw(order, gates)

    def kernels(*arrays):
        chunks = gpu_windows.cut(arrays[6], arrays[5]) if order == "two lists" else None
        return mosaic_gpu.run(options, *arrays, chunks)

    with interpreted(detect_races=gates != "slow"):
        actual = run(kernels, inputs, jnp.bfloat16)
    plain = run(by(xla), inputs, jnp.bfloat16)
    with jax.enable_x64(True):
        exact = run(by(reference), inputs, jnp.float64)
    for a, b, c in zip(actual, exact, plain, strict=True):
        testing.assert_accurate(a, b, c, "bfloat16", order)
        testing.assert_accurate(a, b, c, "bfloat16", order, norm=np.linalg.norm)
    used = sum(size for size, _ in ORDERS[order][0])
    assert not actual[0][:, used:].any()


@pytest.mark.slow
def test_interpreted_inverses_where_keys_repeat():
    """T to the rounding of its bfloat16, beside float64: powers of A would have overflowed."""
    inputs, options = draw("tree", "hard")
    prev, until = (jnp.asarray(inputs[n]) for n in ("prev", "until"))
    links, _ = gpu_windows.find_links(until, 1, gpu_windows.cut(prev, until))
    low = [jnp.asarray(inputs[n], jnp.bfloat16) for n in ("q", "k", "v")]
    high = [jnp.asarray(inputs[n]) for n in ("g", "beta")]
    with interpreted():
        chunked, _ = mosaic_gpu.make_chunks(options, links, *low, *high, blank=())
    k = np.asarray(chunked.k[0, : gpu_windows.C, 0], np.float64)
    G, beta = (np.asarray(x[0, 0, 1], np.float64) for x in (chunked.G, chunked.beta))
    A = np.tril(beta[:, None] * (k @ k.T) * np.exp(G[:, None] - G[None]), -1)
    exact = np.linalg.inv(np.eye(len(A)) + A)
    np.testing.assert_allclose(
        np.asarray(chunked.T[0, 0, 1], np.float64), exact, rtol=2**-8, atol=1e-4
    )
