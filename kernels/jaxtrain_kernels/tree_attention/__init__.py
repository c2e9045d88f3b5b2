"""Attention over packed forests: every key is visible to one interval of queries of its row."""

import jax
import jax.numpy as jnp

from jaxtrain_kernels.context import Context
from jaxtrain_kernels.dispatch import dispatch
from jaxtrain_kernels.tree_attention import cudnn, mosaic_gpu, reference, tpu, triton_gpu, xla

BACKENDS = {
    "mosaic_gpu": mosaic_gpu.attention,
    "tpu": tpu.attention,
    "triton": triton_gpu.attention,
    "xla": xla.attention,
    "cudnn": cudnn.attention,
    "reference": reference.attention,
}


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    context: Context,
    *,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: jax.Array | None = None,
    impl: str = "auto",
) -> jax.Array:
    """Softmax attention with interval masks; returns [B, T, N, V] in q's dtype.

    q [B, T, N, H]; k [B, S, K, H] and v [B, S, K, V] with N a multiple of K; V is mostly H.
    Key s is visible to query row t iff
    context.since[s] <= t < context.until[s], and, with `window`, positions[t] - key_positions[s] <
    window; without one positions are not looked at, and `prev` never is. Scores are q.k * scale
    (default H**-0.5), then softcap * tanh(score / softcap). sinks float [N]: of each query head one
    more score, as it is, in every softmax, for which there is no value.
    The softmax is in float32 (float64 for float64 inputs); a query that sees nothing returns 0.
    Raises ValueError for shapes that do not fit, NotImplementedError if `impl` declines.
    In depth-first packing, `until` (the end of the key's subtree) is the whole ancestor mask.
    """
    B, T, N, H = q.shape
    S, K = k.shape[1:3]
    if k.shape != (B, S, K, H) or v.shape[:-1] != k.shape[:-1] or N % K:
        raise ValueError(
            f"attention: q {q.shape}, k {k.shape}, v {v.shape}; want [B, T, N, H],"
            " [B, S, K, H] and [B, S, K, V] with N a multiple of K"
        )
    if sinks is not None and sinks.shape != (N,):
        raise ValueError(f"attention: sinks {sinks.shape}; want one for each of {N} query heads")
    context = _masks(context, window)
    lengths = {"until": S, "since": S, "positions": T, "key_positions": S}
    for name, length in lengths.items():
        array, shape = getattr(context, name), (B, length)
        if array is not None and (array.shape != shape or array.dtype != jnp.int32):
            raise ValueError(
                f"attention: {name} is {array.dtype}{list(array.shape)}; want int32{list(shape)}"
            )
    return dispatch(
        "attention",
        impl,
        BACKENDS,
        q,
        k,
        v,
        context,
        window=window,
        softcap=softcap,
        scale=H**-0.5 if scale is None else scale,
        sinks=sinks,
    )


def _masks(context: Context, window: int | None) -> Context:
    """Keep only the fields that define visibility, and fill in the keys' positions."""
    if window is None:
        return Context(context.until, context.since)
    positions, keys = context.positions, context.key_positions
    if positions is None:
        raise ValueError("attention: window needs positions: the depth of each query")
    return Context(context.until, context.since, positions, positions if keys is None else keys)
