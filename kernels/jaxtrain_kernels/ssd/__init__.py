"""The state space duality of Mamba-2 (Dao and Gu 2024, arXiv:2405.21060) on packed forests: every
token takes the state of the token before it on its branch."""

import jax
import jax.numpy as jnp

from jaxtrain_kernels.dispatch import dispatch, require_shapes
from jaxtrain_kernels.precision import accumulator
from jaxtrain_kernels.ssd import reference, xla

BACKENDS = {"xla": xla.ssd, "reference": reference.ssd}


def ssd(
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
    """(y [rows, T, N, P] in x's dtype, the state behind the last token of each row).

    S_t = e^(A dt_t) S_prev(t) + dt_t B_t x_t^T;  y_t = S_t^T C_t

    x [rows, T, N, P]; B and C [rows, T, G, S] in x's dtype, N a multiple of G: head n reads group
    n // (N / G). dt [rows, T, N], at least 0 (softplus, bias and limits are behind it), and A [N],
    at most 0, in at least float32. The state [rows, N, S, P] and all sums are in float32 (float64
    for float64 inputs). What goes past the state (D x) is not added here.
    prev int32 [rows, T]: the token before on the branch, -1 at a root; rows are in depth-first
    order, until int32 [rows, T] being the end of each token's subtree (see Context). Roots start
    from `state` (None: zeros). prev None: each row is one chain, and the state behind its last
    token is returned, too; with prev there is no such state, but None. Tokens with until[t] <= t
    are left out: they give 0, change no state and get no gradient; those of a chain are its last
    ones. Gradients flow to x, dt, A, B, C and `state`.
    Raises ValueError for shapes that do not fit, NotImplementedError if `impl` declines.
    """
    rows, T, N, P = x.shape
    G, S = B.shape[2:]
    wide, int32 = accumulator(x.dtype), jnp.dtype(jnp.int32)
    expected = {
        "dt": (dt, (rows, T, N), wide),
        "A": (A, (N,), wide),
        "B": (B, (rows, T, G, S), x.dtype),
        "C": (C, (rows, T, G, S), x.dtype),
        "until": (until, (rows, T), int32),
        "prev": (prev, (rows, T), int32),
        "state": (state, (rows, N, S, P), wide),
    }
    require_shapes("ssd", ("x", x), expected)
    if N % G:
        raise ValueError(f"ssd: {N} heads are no multiple of {G} groups")
    return dispatch("ssd", impl, BACKENDS, x, dt, A, B, C, until, prev, state=state)
