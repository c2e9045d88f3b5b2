"""The Hopper kernels of gated_delta's gradient, interpreted: beside XLA in float64 and bfloat16."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtrain_kernels import testing
from jaxtrain_kernels.gated_delta import gpu_gradients, gpu_windows, mosaic_gpu, xla
from jaxtrain_kernels.gated_delta.cases import Case
from mosaic_interpreter import interpreted

NAMES = ("q", "k", "v", "g", "beta", "state")
FOREST = [(70, -1), (20, 0), (3, 1), (40, 0), (5, -1)]
"""Of chunks of 64, 6, 20 and 40: one that two others follow, and a tree of its own."""


def gradients(function, inputs, state, d_last, dtype, prev):
    """Gradients of q, k, v, g, beta and the state, all as float64 numpy."""
    wide = jnp.promote_types(dtype, jnp.float32)
    arguments = [jnp.asarray(inputs[n], jnp.bfloat16).astype(dtype) for n in ("q", "k", "v")]
    arguments += [jnp.asarray(inputs[n], wide) for n in ("g", "beta")]
    arguments.append(jnp.asarray(state, wide))
    d_out = jnp.asarray(inputs["d_out"], jnp.bfloat16).astype(dtype)
    until = jnp.asarray(inputs["until"])

    def run(*arrays):
        out, last = function(*arrays[:5], until, prev, arrays[5])
        return out if prev is not None else (out, last)

    _, pull = jax.vjp(run, *arguments)
    actual = pull(d_out if prev is not None else (d_out, jnp.asarray(d_last, wide)))
    return [np.asarray(x, np.float64) for x in actual]


def by_xla(*arrays):
    return xla.gated_delta(*arrays[:7], state=arrays[7])


@pytest.fixture(autouse=True)
def few_blocks(monkeypatch):
    """No thread blocks for chunks that are not there, and some that go through several."""
    monkeypatch.setattr(gpu_windows, "capacity", lambda tokens, chain: 5)
    monkeypatch.setattr(gpu_gradients, "num_cores", lambda: 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gates", "chain", "races"),
    [
        ("slow", False, True),
        ("init", False, False),
        ("hard", False, False),
        ("slow", True, True),
    ],
)
def test_interpreted_gradients(gates, chain, races):
    """By the 2x rule beside XLA's; a chain ends inside of a chunk, and something is owed to its
    last state."""
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
    with interpreted(detect_races=races):
        actual = run(functools.partial(mosaic_gpu.run, options), dtype=jnp.bfloat16)
    plain = run(by_xla, dtype=jnp.bfloat16)
    with jax.enable_x64(True):
        exact = run(by_xla, dtype=jnp.float64)
    for name, a, b, c in zip(NAMES, actual, exact, plain, strict=True):
        testing.assert_accurate(a, b, c, "bfloat16", name)
        norm = np.linalg.norm
        testing.assert_accurate(a, b, c, "bfloat16", name, norm=norm)


def test_groups_of_heads_by_the_memory_of_their_states():
    """The benchmarks' shapes go in one; 128k tokens of 32 heads in four, 1.07 GB of states each."""
    for chunks, key_heads, value_heads, expected in (
        (128, 16, 32, 1),
        (512, 16, 32, 1),
        (1024, 16, 32, 2),
        (2048, 16, 32, 4),
        (2048, 16, 48, 8),
        (2048, 1, 2, 1),
        (10**5, 3, 6, 1),  # three key heads are not halved
    ):
        actual = mosaic_gpu.count_groups(chunks, key_heads, value_heads, 128 * 128)
        assert actual == expected, (chunks, key_heads, value_heads)


def test_groups_of_heads_are_put_together_again(monkeypatch):
    """With what a group does made up: each array's part comes back in its place."""
    heads = {"q": 4, "k": 4, "v": 8, "g": 8, "beta": 8}
    arrays = [jnp.arange(2.0 * 3 * n).reshape(2, 3, n, 1) for n in heads.values()]
    arrays[3:] = [x[..., 0] for x in arrays[3:]]
    state = jnp.arange(16.0).reshape(2, 8, 1, 1)
    arrays += [state, arrays[2], state]
    links = gpu_windows.find_links(jnp.full((2, 3), 3, jnp.int32), 1, None)[0]
    monkeypatch.setattr(mosaic_gpu, "STATES", 32)

    def negative(options, links, slots, *part):
        assert part[0].shape[2] == 2 and part[2].shape[2] == 4
        return tuple(-x for x in part[:6])

    monkeypatch.setattr(mosaic_gpu, "_group_back", negative)
    actual = mosaic_gpu._walked_back(None, links, 1, *arrays)
    for a, b in zip(actual, arrays[:6], strict=True):
        np.testing.assert_array_equal(a, -b)
