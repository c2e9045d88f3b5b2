"""The definition of decode attention: all slots of the layer, a mask, a softmax."""

import jax.numpy as jnp

from jaxtrain_kernels.precision import accumulator


def decode_attention(q, k, v, layer, until, since, *, scale, softcap):
    """See `jaxtrain_kernels.decode_attention`. Everything in float32, heads repeated."""
    compute = accumulator(k.dtype)
    groups = q.shape[1] // k.shape[3]
    k_BSNH = jnp.repeat(k[layer].astype(compute), groups, axis=2)
    v_BSNH = jnp.repeat(v[layer].astype(compute), groups, axis=2)
    score_BNS = jnp.einsum("BNH,BSNH->BNS", q.astype(compute), k_BSNH) * scale
    if softcap is not None:
        score_BNS = softcap * jnp.tanh(score_BNS / softcap)
    slot_1S = jnp.arange(k.shape[2], dtype=jnp.int32)[None]
    seen_BS = slot_1S < until[:, None]
    if since is not None:
        seen_BS &= since[:, None] <= slot_1S
    seen_B1S = seen_BS[:, None]
    score_BNS = jnp.where(seen_B1S, score_BNS, jnp.finfo(compute).min)
    top_BN1 = score_BNS.max(-1, keepdims=True)
    weight_BNS = jnp.where(seen_B1S, jnp.exp(score_BNS - top_BN1), 0.0)
    total_BN1 = weight_BNS.sum(-1, keepdims=True)
    weight_BNS = weight_BNS / jnp.where(total_BN1 == 0, 1.0, total_BN1)
    # What nobody sees may be anything, also not a number: the slots were never written.
    v_BSNH = jnp.where(seen_BS[:, :, None, None], v_BSNH, 0.0)
    return jnp.einsum("BNS,BSNH->BNH", weight_BNS, v_BSNH).astype(q.dtype)
