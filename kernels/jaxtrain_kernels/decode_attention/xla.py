"""Decode attention in plain XLA: products and sums in one pass each, grouped heads.

Not matmuls: for those XLA would lay out keys by heads, and carry a transposed copy of the whole
cache through the sampler's loop on GPUs, or transpose each layer on CPUs.
"""

import jax
import jax.numpy as jnp

from jaxtrain_kernels.precision import accumulator


def decode_attention(
    q, k, v, layer, until, since, *, scale, softcap, sinks=None, k_scale=None, v_scale=None, **_
):
    """Implement `jaxtrain_kernels.decode_attention`. Unwritten slots must hold finite numbers. What
    rows share each reads for itself."""
    B, T, N, H = q.shape
    S, K = k.shape[2:4]
    product = k.dtype if k_scale is None else q.dtype
    compute = accumulator(product)

    def of_layer(x):
        layer_cache = jax.lax.dynamic_index_in_dim(x, layer, keepdims=False)
        return layer_cache[:, None, :, :, None].astype(compute)

    k_B1SK1H, v_B1SK1H = of_layer(k), of_layer(v)
    # Queries are rounded to the dtype of the products, as the kernel does; sums are wide.
    q_BT1KGH = q.reshape(B, T, 1, K, N // K, H).astype(product).astype(compute)
    score_BTSKG = (q_BT1KGH * k_B1SK1H).sum(-1) * scale
    if k_scale is not None:
        score_BTSKG *= of_layer(k_scale)
    if softcap is not None:
        score_BTSKG = softcap * jnp.tanh(score_BTSKG / softcap)
    slot_11S = jnp.arange(S, dtype=jnp.int32)[None, None]
    seen_BTS = slot_11S < until[:, :, None]
    if since is not None:
        seen_BTS &= since[:, :, None] <= slot_11S
    seen_BTS11 = seen_BTS[..., None, None]
    # A finite stand-in for -inf: a query that sees nothing has weights of 0, not NaN.
    score_BTSKG = jnp.where(seen_BTS11, score_BTSKG, jnp.finfo(compute).min)
    top_BT1KG = score_BTSKG.max(2, keepdims=True)
    if sinks is not None:
        sink_111KG = sinks.astype(compute).reshape(1, 1, 1, K, N // K)
        top_BT1KG = jnp.maximum(top_BT1KG, sink_111KG)
    weight_BTSKG = jnp.exp(score_BTSKG - top_BT1KG)
    weight_BTSKG = jnp.where(seen_BTS11, weight_BTSKG, 0.0)
    total_BTKG1 = weight_BTSKG.sum(2)[..., None]
    if sinks is not None:
        total_BTKG1 += jnp.exp(sink_111KG - top_BT1KG)[:, :, 0, ..., None]
    if v_scale is not None:
        weight_BTSKG *= of_layer(v_scale)
    out_BTKGH = (weight_BTSKG[..., None] * v_B1SK1H).sum(2)
    out_BTKGH = out_BTKGH / jnp.where(total_BTKG1 == 0, 1.0, total_BTKG1)
    return out_BTKGH.reshape(B, T, N, H).astype(q.dtype)
