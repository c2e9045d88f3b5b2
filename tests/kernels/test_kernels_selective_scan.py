"""Mamba's recurrence on forests against a float64 recurrence that runs each branch alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtrain_kernels import selective_scan
from jaxtrain_kernels.selective_scan import reference, xla
from test_kernels_gated_delta import FORESTS, T, pack
from test_kernels_ssd import with_gradients

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
    """Outputs against numpy; gradients, of the first states too, against autodiff of the reference
    in float64. Each row starts from a state, so roots are not all alike."""
    *arguments, d_y = draw()
    rows = [pack(FORESTS[name]), pack(FORESTS["caterpillar"])]
    until, prev = (jnp.asarray(np.stack([row[i] for row in rows])) for i in (0, 1))
    with jax.enable_x64(True):
        provided = ([jnp.asarray(item) for item in arguments], jnp.asarray(d_y), until, prev)
        actual, expected = run(*provided), RUN_REFERENCE(*provided)
    x, dt, A, B, C, state = arguments
    for row, (_, _, branches) in enumerate(rows):
        unused = set(range(T))
        for path in branches:
            alone, _ = run_alone(path, x[row], dt[row], A, B[row], C[row], state[row])
            for t in path:
                scale = max(1, np.abs(alone[t]).max())
                np.testing.assert_allclose(actual[0][row, t], alone[t], atol=1e-13 * scale)
            unused -= set(path)
        assert not np.asarray(actual[0])[row, sorted(unused)].any(), "padding gives 0"
    for label, a, b in zip(("y", *NAMES), actual, expected, strict=True):
        # The order of sums alone.
        np.testing.assert_allclose(a, b, atol=1e-12 * np.abs(b).max(), err_msg=label)


@pytest.mark.slow
def test_a_row_in_pieces_ends_in_the_same_state():
    """Prompts in pieces of any length and single tokens; a row without new tokens keeps its state
    bit for bit."""
    x, dt, A, B, C, state, _ = draw()
    step = jax.jit(selective_scan)
    with jax.enable_x64(True):
        H, seen = jnp.asarray(state), np.zeros(2, int)
        for width, counts in [(9, [9, 5]), (1, [1, 0]), (1, [1, 1]), (9, [0, 7]), (9, [2, 9])]:
            part = [np.ones((2, width, item.shape[2])) for item in (x, dt, B, C)]
            for array, item in zip(part, (x, dt, B, C), strict=True):
                for row, count in enumerate(counts):
                    array[row, :count] = item[row, seen[row] : seen[row] + count]
            until = np.where(np.arange(width) < np.array(counts)[:, None], width, 0)
            before, (x_, dt_, B_, C_) = H, map(jnp.asarray, part)
            y, H = step(x_, dt_, jnp.asarray(A), B_, C_, jnp.asarray(until, jnp.int32), state=H)
            for row, count in enumerate(counts):
                index = range(seen[row] + count)
                alone, last = run_alone(index, x[row], dt[row], A, B[row], C[row], state[row])
                np.testing.assert_allclose(H[row], last, atol=1e-13)
                for t in range(count):
                    np.testing.assert_allclose(y[row, t], alone[seen[row] + t], atol=1e-13)
                if count == 0:
                    np.testing.assert_array_equal(H[row], before[row])
            seen += counts


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
