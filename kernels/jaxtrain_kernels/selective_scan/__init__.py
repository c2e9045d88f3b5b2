"""The selective scan of Mamba (Gu and Dao 2023, arXiv:2312.00752) on packed forests: every token
takes the state of the token before it on its branch."""

import jax
import jax.numpy as jnp

from jaxtrain_kernels.dispatch import dispatch, require_shapes
from jaxtrain_kernels.precision import accumulator
from jaxtrain_kernels.selective_scan import reference, xla

BACKENDS = {"xla": xla.selective_scan, "reference": reference.selective_scan}


def selective_scan(
    x: jax.Array,
    dt: jax.Array,
    A: jax.Array,
    B: jax.Array,
    C: jax.Array,
    until: jax.Array,
    prev: jax.Array | None = None,
    *,
    state: jax.Array | None = None,
    impl: str = "auto",
) -> tuple[jax.Array, jax.Array | None]:
    """(y [rows, T, F] in x's dtype, the state behind the last token of each row).

    H_t = e^(dt_t A) * H_prev(t) + B_t (dt_t x_t)^T;  y_t = C_t H_t

    x [rows, T, F]; B and C [rows, T, S] in x's dtype. dt [rows, T, F], at least 0, and A [S, F], at
    most 0, in at least float32: each channel forgets each of its S numbers at a rate of its own.
    The state [rows, S, F] and all sums are in float32 (float64 for float64 inputs). What goes past
    the state (D x) is not added here. until, prev, and what is returned, left out or refused: as
    for `ssd`.
    """
    (rows, T, F), S = x.shape, B.shape[-1]
    wide, int32 = accumulator(x.dtype), jnp.dtype(jnp.int32)
    expected = {
        "dt": (dt, (rows, T, F), wide),
        "A": (A, (S, F), wide),
        "B": (B, (rows, T, S), x.dtype),
        "C": (C, (rows, T, S), x.dtype),
        "until": (until, (rows, T), int32),
        "prev": (prev, (rows, T), int32),
        "state": (state, (rows, S, F), wide),
    }
    require_shapes("selective_scan", ("x", x), expected)
    if state is None:
        state = jnp.zeros((rows, S, F), wide)
    return dispatch("selective_scan", impl, BACKENDS, x, dt, A, B, C, until, prev, state=state)
