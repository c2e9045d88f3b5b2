"""Mamba-2's recurrence on forests against a float64 recurrence that runs each branch alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forest_checks import check_branches, check_pieces, with_gradients
from jaxtrain_kernels import causal_conv, ssd
from jaxtrain_kernels.ssd import reference, xla
from test_kernels_gated_delta import FORESTS, T, pack

NAMES = ("x", "dt", "A", "B", "C", "state")
N, G, S, P = 4, 2, 6, 5


@functools.cache
def draw(seed=0):
    """Arguments of two rows in float64 numpy, the state, and what the loss weighs y with."""
    rng = np.random.default_rng(seed)
    normal = rng.standard_normal
    dt, A = np.exp(normal((2, T, N)) - 2), -np.exp(normal(N))
    dt[:, 40] = 300.0  # a token that forgets all; exp before its mask would overflow
    B, C = normal((2, 2, T, G, S))
    return normal((2, T, N, P)), dt, A, B, C, normal((2, N, S, P)), normal((2, T, N, P))


def run_alone(path, x, dt, A, B, C, state):
    """Run one branch of one row token by token in numpy: {token: y [N, P]}, and the last state."""
    H, actual = state.copy(), {}
    for t in path:
        for n in range(N):
            group = n // (N // G)
            H[n] = np.exp(A[n] * dt[t, n]) * H[n] + dt[t, n] * np.outer(B[t, group], x[t, n])
            actual.setdefault(t, np.zeros((N, P)))[n] = H[n].T @ C[t, group]
    return actual, H


RUN = with_gradients(functools.partial(xla.ssd, chunk=4, lanes=3))
RUN_LONG = with_gradients(functools.partial(xla.ssd, lanes=1))
RUN_REFERENCE = with_gradients(reference.ssd)


@pytest.mark.parametrize(
    ("name", "run"),
    [
        *[(name, RUN) for name in FORESTS],
        *[pytest.param(name, RUN_LONG, marks=pytest.mark.slow) for name in FORESTS],
    ],
)
def test_a_forest_is_its_branches(name, run):
    *arguments, d_y = draw()
    x, dt, A, B, C, state = arguments

    def alone(path, row):
        return run_alone(path, x[row], dt[row], A, B[row], C[row], state[row])[0]

    check_branches(name, run, RUN_REFERENCE, arguments, d_y, alone, ("y", *NAMES))


def test_a_row_in_pieces_ends_in_the_same_state():
    x, dt, A, B, C, state, _ = draw()

    def alone(path, row):
        return run_alone(path, x[row], dt[row], A, B[row], C[row], state[row])

    check_pieces(ssd, (x, dt, A, B, C, state), alone)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.thorough), "bfloat16"])
def test_rounding(dtype):
    """Errors by norm beside float64: of float32 sums, and of bfloat16 operands."""
    rng = np.random.default_rng(0)
    until, prev, _ = pack(FORESTS["caterpillar"])
    until, prev = (jnp.asarray(np.stack([item] * 2)) for item in (until, prev))
    x, dt, A, B, C, state, d_y = (item.astype(np.float32) for item in draw())
    dt = rng.uniform(0.001, 0.1, dt.shape).astype(np.float32)  # of a trained model
    low = [jnp.asarray(x, dtype), dt, A, jnp.asarray(B, dtype), jnp.asarray(C, dtype), state]
    actual = with_gradients(xla.ssd)(low, jnp.asarray(d_y, dtype), until, prev)
    with jax.enable_x64(True):
        exact = [jnp.asarray(np.asarray(item), "float64") for item in low]
        wide = jnp.asarray(np.asarray(jnp.asarray(d_y, dtype)), "float64")
        expected = RUN_REFERENCE(exact, wide, until, prev)
    for name, a, b in zip(("y", *NAMES), actual, expected, strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b)
        error = np.linalg.norm(a - b) / np.linalg.norm(b)
        assert error < (1.3e-2 if dtype == "bfloat16" else 5e-6), f"{name}: {error:.1e}"


def test_a_convolution_has_a_bias():
    _, prev, _ = pack(FORESTS["short nodes"])
    rng = np.random.default_rng(0)
    x, w, bias = (jnp.asarray(rng.standard_normal(s), "float32") for s in ((1, T, 3), (3, 4), (3,)))
    for before in (jnp.asarray(prev)[None], None):
        plain = causal_conv(x, w, before)
        np.testing.assert_allclose(causal_conv(x, w, before, bias=bias), plain + bias, rtol=1e-6)


@pytest.mark.parametrize("impl", ["xla", "reference"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_strict_modes(impl, dtype):
    """Traced only: no dtype and no rank is promoted on the quiet."""
    x, B = jnp.ones((1, T, 4, 8), dtype), jnp.ones((1, T, 2, 8), dtype)
    dt, until = jnp.ones((1, T, 4), jnp.float32), jnp.full((1, T), T, jnp.int32)

    def loss(x, B, prev):
        y, _ = ssd(x, dt, -dt[0, 0], B, B, until, prev, impl=impl)
        return y.astype(jnp.float32).sum()

    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        for prev in (None, until - 2):
            actual = jax.eval_shape(jax.grad(loss, (0, 1)), x, B, prev)
            assert {item.dtype for item in actual} == {jnp.dtype(dtype)}


def test_shapes_that_do_not_fit_are_refused():
    x, B = jnp.ones((1, 8, 3, 4)), jnp.ones((1, 8, 2, 4))
    dt, until = jnp.ones((1, 8, 3)), jnp.ones((1, 8), jnp.int32)
    with pytest.raises(ValueError, match="3 heads are no multiple of 2 groups"):
        ssd(x, dt, -dt[0, 0], B, B, until)
    with pytest.raises(ValueError, match=r"A is float32\[2\].*want float32\[3\]"):
        ssd(x, dt, -dt[0, 0, :2], B, B, until)
