"""Decode attention: one query or a few per row against the keys of one layer of a cache."""

import jax
import jax.numpy as jnp

from jaxtrain_kernels.decode_attention import gpu, reference, xla
from jaxtrain_kernels.dispatch import dispatch

BACKENDS = {
    "gpu": gpu.decode_attention,
    "xla": xla.decode_attention,
    "reference": reference.decode_attention,
}


def decode_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    layer: jax.Array | int,
    until: jax.Array,
    since: jax.Array | None = None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    leader: jax.Array | None = None,
    shared: jax.Array | None = None,
    impl: str = "auto",
) -> jax.Array:
    """Softmax attention of one query per row, or of a few; returns q's shape and dtype.

    q [B, N, H] or [B, T, N, H]; k, v [L, B, S, K, H] with N a multiple of K: the cache of all
    layers, of which `layer` (int32 scalar, may be traced) is read. A query sees the slots of its
    row from `since` (default 0) up to, but not with, `until`, each int32 [B] or [B, T]; there are
    none outside of [0, S), and a query that sees none returns 0. Scores are q.k * scale (default
    H**-0.5), then softcap * tanh(score / softcap); sinks float [N] are one more score of each head,
    without a value. Products are in the cache's dtype, sums and the
    softmax in float32 (float64 for float64 caches).

    A cache of 8 bits comes with its scales: k, v are codes in int8 or float8_e4m3fn, and k_scale,
    v_scale float32 [L, B, S, K] are what the H codes of a slot and head are multiplied by. Products
    are then in q's dtype, and no wider copy of the cache is made.

    Rows that begin alike, as answers to one prompt, may say so: the first `shared` slots of a row
    hold what those of row `leader` hold, each int32 [B]. A GPU then reads them where all of these
    rows do, once from memory, and finds the same bits; the others read the row's own.

    On a GPU each of T queries is computed as it is alone, bit for bit. For sampling: no gradients.
    Raises ValueError for shapes that do not fit, NotImplementedError if `impl` declines.
    """
    B, *few, N, H = q.shape
    if (
        len(few) > 1
        or k.ndim != 5
        or k.shape != v.shape
        or (k.shape[1], k.shape[4]) != (B, H)
        or N % k.shape[3]
    ):
        raise ValueError(
            f"decode_attention: q {q.shape}, k {k.shape}, v {v.shape}; want [B, N, H] or"
            " [B, T, N, H] and twice [L, B, S, K, H] with N a multiple of K"
        )
    if (k_scale is None) != (v_scale is None) or (k.dtype.itemsize == 1) != (k_scale is not None):
        raise ValueError(
            "decode_attention: keys and values of 8 bits come with k_scale and v_scale, others"
            f" with neither; k is {k.dtype}, k_scale {_named(k_scale)}, v_scale {_named(v_scale)}"
        )
    for name, array in {"k_scale": k_scale, "v_scale": v_scale}.items():
        if array is not None and (array.shape != k.shape[:4] or array.dtype != jnp.float32):
            raise ValueError(
                f"decode_attention: {name} is {_named(array)}; want float32{list(k.shape[:4])}"
            )
    shape = (B, *few)
    for name, array in {"until": until, "since": since}.items():
        if array is not None and (array.shape != shape or array.dtype != jnp.int32):
            raise ValueError(
                f"decode_attention: {name} is {_named(array)}; want int32{list(shape)}"
            )
    if (leader is None) != (shared is None):
        raise ValueError("decode_attention: leader and shared come together")
    for name, array in {"leader": leader, "shared": shared}.items():
        if array is not None and (array.shape != (B,) or array.dtype != jnp.int32):
            raise ValueError(f"decode_attention: {name} is {_named(array)}; want int32[{B}]")
    if sinks is not None and sinks.shape != (N,):
        raise ValueError(
            f"decode_attention: sinks {sinks.shape}; want one for each of {N} query heads"
        )
    layer = jnp.asarray(layer, jnp.int32)
    scale = H**-0.5 if scale is None else scale
    out = dispatch(
        "decode_attention",
        impl,
        BACKENDS,
        q if few else q[:, None],
        k,
        v,
        layer,
        *(x if few or x is None else x[:, None] for x in (until, since)),
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
        leader=leader,
        shared=shared,
    )
    return out.reshape(q.shape)


def _named(array: jax.Array | None) -> str:
    return "None" if array is None else f"{array.dtype}{list(array.shape)}"
