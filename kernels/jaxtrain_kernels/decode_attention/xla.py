"""Decode attention in plain XLA: grouped heads, products in the cache's dtype."""

import jax
import jax.numpy as jnp

from jaxtrain_kernels.precision import accumulator


def decode_attention(q, k, v, layer, until, since, *, scale, softcap):
    """See `jaxtrain_kernels.decode_attention`. Unwritten slots must hold finite numbers."""
    B, N, H = q.shape
    S, K = k.shape[2:4]
    compute = accumulator(k.dtype)
    k_BSKH, v_BSKH = (jax.lax.dynamic_index_in_dim(x, layer, keepdims=False) for x in (k, v))
    q_BKGH = q.reshape(B, K, N // K, H).astype(k.dtype)
    score_BKGS = jnp.einsum("BKGH,BSKH->BKGS", q_BKGH, k_BSKH, preferred_element_type=compute)
    score_BKGS *= scale
    if softcap is not None:
        score_BKGS = softcap * jnp.tanh(score_BKGS / softcap)
    slot_1S = jnp.arange(S, dtype=jnp.int32)[None]
    seen_BS = slot_1S < until[:, None]
    if since is not None:
        seen_BS &= since[:, None] <= slot_1S
    seen_B11S = seen_BS[:, None, None]
    # A finite stand-in for -inf: a row that sees nothing has weights of 0, not NaN.
    score_BKGS = jnp.where(seen_B11S, score_BKGS, jnp.finfo(compute).min)
    weight_BKGS = jnp.exp(score_BKGS - score_BKGS.max(-1, keepdims=True))
    weight_BKGS = jnp.where(seen_B11S, weight_BKGS, 0.0)
    total_BKG1 = weight_BKGS.sum(-1, keepdims=True)
    out_BKGH = jnp.einsum(
        "BKGS,BSKH->BKGH", weight_BKGS.astype(v.dtype), v_BSKH, preferred_element_type=compute
    )
    out_BKGH = out_BKGH / jnp.where(total_BKG1 == 0, 1.0, total_BKG1)
    return out_BKGH.reshape(B, N, H).astype(q.dtype)
