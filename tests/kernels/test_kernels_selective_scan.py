"""Mamba's recurrence on forests against a float64 recurrence that runs each branch alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forest_checks import check_branches, check_pieces, with_gradients
from jaxtrain_kernels import selective_scan
from jaxtrain_kernels.selective_scan import reference, xla
from test_kernels_gated_delta import FORESTS, T

NAMES = ("x", "dt", "A", "B", "C", "state")
F, S = 7, 5


@functools.cache
def draw(seed=0):
    """Arguments of two rows in float64 numpy, the state, and what the loss weighs y with."""
    normal = np.random.default_rng(seed).standard_normal
    dt, A = np.exp(normal((2, T, F)) - 2), -np.exp(normal((S, F)))
    dt[:, 40] = 300.0  # a token that forgets all
    B, C = normal((2, 2, T, S))
    return normal((2, T, F)), dt, A, B, C, normal((2, S, F)), normal((2, T, F))


def run_alone(path, x, dt, A, B, C, state):
    """Run one branch of one row token by token in numpy: {token: y [F]}, and the last state."""
    H, actual = state.copy(), {}
    for t in path:
        H = np.exp(A * dt[t]) * H + np.outer(B[t], dt[t] * x[t])
        actual[t] = C[t] @ H
    return actual, H


RUN = with_gradients(functools.partial(xla.selective_scan, chunk=4, lanes=3))
RUN_LONG = with_gradients(functools.partial(xla.selective_scan, lanes=1))
RUN_REFERENCE = with_gradients(reference.selective_scan)


@pytest.mark.parametrize(
    ("name", "run"),
    [
        *[pytest.param(name, RUN, marks=pytest.mark.slow) for name in FORESTS],
        *[pytest.param(name, RUN_LONG, marks=pytest.mark.thorough) for name in FORESTS],
    ],
)
def test_a_forest_is_its_branches(name, run):
    *arguments, d_y = draw()
    x, dt, A, B, C, state = arguments

    def alone(path, row):
        return run_alone(path, x[row], dt[row], A, B[row], C[row], state[row])[0]

    check_branches(name, run, RUN_REFERENCE, arguments, d_y, alone, ("y", *NAMES))


@pytest.mark.slow
def test_a_row_in_pieces_ends_in_the_same_state():
    x, dt, A, B, C, state, _ = draw()

    def alone(path, row):
        return run_alone(path, x[row], dt[row], A, B[row], C[row], state[row])

    check_pieces(selective_scan, (x, dt, A, B, C, state), alone)


@pytest.mark.parametrize("impl", ["xla", "reference"])
def test_strict_modes_and_shapes(impl):
    """Traced only: no dtype and no rank is promoted on the quiet; what does not fit is refused."""
    x, B = jnp.ones((1, T, 8), "bfloat16"), jnp.ones((1, T, 3), "bfloat16")
    dt, until = jnp.ones((1, T, 8), jnp.float32), jnp.full((1, T), T, jnp.int32)

    def loss(x, B, prev):
        y, _ = selective_scan(x, dt, -dt[0, :3], B, B, until, prev, impl=impl)
        return y.astype(jnp.float32).sum()

    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        for prev in (None, until - 2):
            actual = jax.eval_shape(jax.grad(loss, (0, 1)), x, B, prev)
            assert {item.dtype for item in actual} == {jnp.dtype("bfloat16")}
    with pytest.raises(ValueError, match=r"A is float32\[2, 8\].*want float32\[3, 8\]"):
        selective_scan(x, dt, -dt[0, :2], B, B, until)
