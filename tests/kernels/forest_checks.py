"""Checks of recurrences on packed forests, shared by their tests."""

import jax
import jax.numpy as jnp
import numpy as np
from test_kernels_gated_delta import FORESTS, T, pack

PIECES = [(9, [9, 5]), (1, [1, 0]), (1, [1, 1]), (9, [0, 7]), (9, [2, 9])]
"""Width of a batch, and the new tokens of each of its two rows."""


def with_gradients(function):
    """(arguments, d_y, until, prev) -> y and the gradients to all arguments."""

    def run(arguments, d_y, until, prev):
        def loss(arguments):
            *inputs, state = arguments
            y, _ = function(*inputs, until, prev, state=state)
            return (y * d_y).sum(), y

        (_, y), grads = jax.value_and_grad(loss, has_aux=True)(list(arguments))
        return y, *grads

    return jax.jit(run)


def check_branches(name, run, reference, arguments, d_y, run_alone, labels):
    """Compare outputs with branches that run alone in numpy, and gradients, of the first states
    too, with autodiff of the reference in float64. Each of two rows starts from a state, so roots
    are not all alike.

    arguments: of two rows, in float64. run_alone: (branch, row) -> {token: output}.
    """
    rows = [pack(FORESTS[name]), pack(FORESTS["caterpillar"])]
    until, prev = (jnp.asarray(np.stack([row[i] for row in rows])) for i in (0, 1))
    with jax.enable_x64(True):
        provided = ([jnp.asarray(item) for item in arguments], jnp.asarray(d_y), until, prev)
        actual, expected = run(*provided), reference(*provided)
    for row, (_, _, branches) in enumerate(rows):
        unused = set(range(T))
        for path in branches:
            alone = run_alone(path, row)
            for t in path:
                scale = max(1, np.abs(alone[t]).max())
                np.testing.assert_allclose(actual[0][row, t], alone[t], atol=1e-13 * scale)
            unused -= set(path)
        assert not np.asarray(actual[0])[row, sorted(unused)].any(), "padding gives 0"
    for label, a, b in zip(labels, actual, expected, strict=True):
        # The order of sums alone.
        np.testing.assert_allclose(a, b, atol=1e-12 * np.abs(b).max(), err_msg=label)


def check_pieces(op, arguments, run_alone):
    """Read two rows in pieces of any length and single tokens: states and outputs are those of a
    row read at once, what stands behind a row's end leaves no trace, and a row without new tokens
    keeps its state bit for bit.

    arguments: x, dt, A, B, C and state in float64. run_alone: (tokens, row) -> ({token: output},
    the last state).
    """
    x, dt, A, B, C, state = arguments
    step, by_token = jax.jit(op), (x, dt, B, C)
    with jax.enable_x64(True):
        H, seen = jnp.asarray(state), np.zeros(2, int)
        for width, counts in PIECES:
            part = [np.ones((2, width, *item.shape[2:])) for item in by_token]
            for array, item in zip(part, by_token, strict=True):
                for row, count in enumerate(counts):
                    array[row, :count] = item[row, seen[row] : seen[row] + count]
            until = np.where(np.arange(width) < np.array(counts)[:, None], width, 0)
            before, (x_, dt_, B_, C_) = H, map(jnp.asarray, part)
            y, H = step(x_, dt_, jnp.asarray(A), B_, C_, jnp.asarray(until, jnp.int32), state=H)
            for row, count in enumerate(counts):
                alone, last = run_alone(range(seen[row] + count), row)
                np.testing.assert_allclose(H[row], last, atol=1e-13)
                for t in range(count):
                    np.testing.assert_allclose(y[row, t], alone[seen[row] + t], atol=1e-13)
                if count == 0:
                    np.testing.assert_array_equal(H[row], before[row])
            seen += counts
