"""The gated delta rule (Yang et al. 2024, arXiv:2412.06464) on packed forests: every token takes
the state of the token before it on its branch."""

import jax
import jax.numpy as jnp

from jaxtrain_kernels.dispatch import dispatch, require_shapes
from jaxtrain_kernels.gated_delta import gpu_decode, mosaic_gpu, reference, xla
from jaxtrain_kernels.gated_delta.mosaic_gpu import find_chunks
from jaxtrain_kernels.precision import accumulator

__all__ = ["find_chunks", "gated_delta"]

BACKENDS = {
    "mosaic_gpu": mosaic_gpu.gated_delta,
    "gpu_decode": gpu_decode.gated_delta,
    "xla": xla.gated_delta,
    "reference": reference.gated_delta,
}


def gated_delta(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    until: jax.Array,
    prev: jax.Array | None = None,
    *,
    state: jax.Array | None = None,
    chunks: tuple[jax.Array, ...] | None = None,
    impl: str = "auto",
) -> tuple[jax.Array, jax.Array | None]:
    """(o [B, T, N, V] in v's dtype, the state behind the last token of each row).

    S_t = e^g_t S_prev(t);  d = beta_t (v_t - S_t^T k_t);  S_t += k_t d^T;  o_t = S_t^T q_t

    q, k [B, T, H, K]; v [B, T, N, V] with N a multiple of H: value head n reads key head n // (N /
    H). g [B, T, N], at most 0, and beta [B, T, N] in at least float32. The state [B, N, K, V] and
    all sums are in float32 (float64 for float64 inputs).
    prev int32 [B, T]: the token before on the branch, -1 at a root; rows are in depth-first order,
    until int32 [B, T] being the end of each token's subtree (see Context). Roots start from `state`
    (None: zeros). prev None: each row is one chain, and the state behind its last token is
    returned, too; with prev there is no such state, but None. Tokens with until[t] <= t are left
    out: they give 0, change no state and get no gradient; those of a chain are its last ones.
    chunks: `find_chunks(until, prev)`, which layers of the same rows share; None: found here.
    Gradients flow to q, k, v, g, beta and `state`. Nothing is normalized or scaled here.
    Raises ValueError for shapes that do not fit, NotImplementedError if `impl` declines.
    """
    B, T, H, K = q.shape
    N, V = v.shape[2:]
    wide = accumulator(q.dtype)
    expected = {
        "k": (k, (B, T, H, K), q.dtype),
        "v": (v, (B, T, N, V), q.dtype),
        "g": (g, (B, T, N), wide),
        "beta": (beta, (B, T, N), wide),
        "until": (until, (B, T), jnp.dtype(jnp.int32)),
        "prev": (prev, (B, T), jnp.dtype(jnp.int32)),
        "state": (state, (B, N, K, V), wide),
    }
    require_shapes("gated_delta", ("q", q), expected)
    if N % H:
        raise ValueError(f"gated_delta: {N} value heads are no multiple of {H} key heads")
    return dispatch(
        "gated_delta", impl, BACKENDS, q, k, v, g, beta, until, prev, state=state, chunks=chunks
    )
