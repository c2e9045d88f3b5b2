"""The definition of tree attention: a dense mask, a softmax, plain autodiff."""

import jax
import jax.numpy as jnp

from jaxtrain_kernels.precision import accumulator


def visible(rows, context, window):
    """bool [B, T, S]: does query row rows[t] see key s? `rows` int32 [T], whose positions
    `context` has; the rest as `attention`."""
    since, until = context.since, context.until
    row = rows[None, :, None]
    first = jnp.arange(until.shape[1], dtype=jnp.int32)[None] if since is None else since
    mask = (first[:, None, :] <= row) & (row < until[:, None, :])
    if window is not None:
        mask &= context.positions[:, :, None] - context.key_positions[:, None, :] < window
    return mask


def attention(q, k, v, context, *, window=None, softcap=None, scale, sinks=None):
    """Implement `jaxtrain_kernels.attention`. Holds [B, N, T, S] scores: for tests and tiny
    inputs."""
    B, T, N, H = q.shape
    K = k.shape[2]
    compute = accumulator(q.dtype)
    q_BTKGH = q.reshape(B, T, K, N // K, H)
    score_BKGTS = jnp.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k, preferred_element_type=compute)
    score_BKGTS *= scale
    if softcap is not None:
        score_BKGTS = softcap * jnp.tanh(score_BKGTS / softcap)
    mask_BTS = visible(jnp.arange(T, dtype=jnp.int32), context, window)
    mask_B11TS = mask_BTS[:, None, None]
    # A finite stand-in for -inf: a row that sees nothing must have gradients of 0, not NaN.
    score_BKGTS = jnp.where(mask_B11TS, score_BKGTS, jnp.finfo(compute).min)
    top = jax.lax.stop_gradient(score_BKGTS.max(-1, keepdims=True))
    if sinks is not None:
        sink_1KG11 = sinks.astype(compute).reshape(1, K, N // K, 1, 1)
        top = jnp.maximum(top, jax.lax.stop_gradient(sink_1KG11))
    weight_BKGTS = jnp.where(mask_B11TS, jnp.exp(score_BKGTS - top), 0.0)
    total = weight_BKGTS.sum(-1, keepdims=True)
    if sinks is not None:
        total += jnp.exp(sink_1KG11 - top)
    weight_BKGTS = weight_BKGTS / jnp.where(total == 0, 1.0, total)
    out_BTKGH = jnp.einsum(
        "BKGTS,BSKH->BTKGH", weight_BKGTS.astype(v.dtype), v, preferred_element_type=compute
    )
    return out_BTKGH.reshape(B, T, N, -1).astype(q.dtype)
