"""The definition of decode attention: all slots of the layer, a mask, a softmax."""

import jax.numpy as jnp

from jaxtrain_kernels.precision import accumulator


def decode_attention(
    q, k, v, layer, until, since, *, scale, softcap, sinks=None, k_scale=None, v_scale=None, **_
):
    """Implement `jaxtrain_kernels.decode_attention`. Everything in float32, heads repeated. What
    rows share each reads for itself."""
    compute = accumulator(k.dtype if k_scale is None else q.dtype)
    groups = q.shape[2] // k.shape[3]

    def widen(codes, scales):
        wide_BSKH = codes[layer].astype(compute)
        if scales is not None:
            wide_BSKH *= scales[layer, ..., None].astype(compute)
        return jnp.repeat(wide_BSKH, groups, axis=2)

    k_BSNH, v_BSNH = widen(k, k_scale), widen(v, v_scale)
    score_BTNS = jnp.einsum("BTNH,BSNH->BTNS", q.astype(compute), k_BSNH) * scale
    if softcap is not None:
        score_BTNS = softcap * jnp.tanh(score_BTNS / softcap)
    slot_11S = jnp.arange(k.shape[2], dtype=jnp.int32)[None, None]
    seen_BTS = slot_11S < until[:, :, None]
    if since is not None:
        seen_BTS &= since[:, :, None] <= slot_11S
    seen_BT1S = seen_BTS[:, :, None]
    score_BTNS = jnp.where(seen_BT1S, score_BTNS, jnp.finfo(compute).min)
    top_BTN1 = score_BTNS.max(-1, keepdims=True)
    if sinks is not None:
        sink_11N1 = sinks.astype(compute)[None, None, :, None]
        top_BTN1 = jnp.maximum(top_BTN1, sink_11N1)
    weight_BTNS = jnp.where(seen_BT1S, jnp.exp(score_BTNS - top_BTN1), 0.0)
    total_BTN1 = weight_BTNS.sum(-1, keepdims=True)
    if sinks is not None:
        total_BTN1 += jnp.exp(sink_11N1 - top_BTN1)
    weight_BTNS = weight_BTNS / jnp.where(total_BTN1 == 0, 1.0, total_BTN1)
    # What nobody sees may be anything, also not a number: the slots were never written.
    v_BSNH = jnp.where(seen_BTS.any(1)[:, :, None, None], v_BSNH, 0.0)
    return jnp.einsum("BTNS,BSNH->BTNH", weight_BTNS, v_BSNH).astype(q.dtype)
