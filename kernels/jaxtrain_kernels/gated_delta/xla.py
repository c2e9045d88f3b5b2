"""The gated delta rule in plain XLA: the walk of recurrence/walk.py with the chunks of chunk.py."""

import functools

import jax.numpy as jnp

from jaxtrain_kernels.gated_delta import chunk as body
from jaxtrain_kernels.precision import accumulator
from jaxtrain_kernels.recurrence.walk import ChunkRule, run


def gated_delta(
    q, k, v, g, beta, until, prev=None, *, state=None, chunks=None, chunk=64, lanes=None
):
    """Implement `jaxtrain_kernels.gated_delta`; `chunk` and `lanes` override the schedule."""
    B, T, H, K = q.shape
    N, V = v.shape[2:]
    if state is None:
        state = jnp.zeros((B, N, K, V), accumulator(q.dtype))
    if T == 1 and prev is None:
        return _one_token(q, k, v, g, beta, until, state)
    heads = functools.partial(jnp.reshape, shape=(B, T, H, N // H, 1))
    inputs = (q, k, v.reshape(B, T, H, N // H, V), heads(g), heads(beta))
    out, last = run(RULE, inputs, state.reshape(B, H, N // H, K, V), until, prev, chunk, lanes)
    return out.reshape(B, T, N, V), last.reshape(B, N, K, V) if prev is None else None


def _prepare(q, k, v, g, beta):
    return body.prepare(q, k, v, g[..., 0], beta[..., 0])


def _gradients(*arguments):
    *wide, d_g, d_beta = body.gradients(*arguments)
    return *wide, d_g[..., None], d_beta[..., None]


RULE = ChunkRule(_prepare, body.enter, body.outputs, body.leave, _gradients)


def _one_token(q, k, v, g, beta, until, state):
    """The recurrence itself: the state is read and written once."""
    B, _, H, K = q.shape
    wide, repeats = state.dtype, v.shape[2] // H
    q_BNK, k_BNK = (jnp.repeat(x[:, 0], repeats, axis=1).astype(wide) for x in (q, k))
    decayed = jnp.exp(g[:, 0])[..., None, None] * state
    seen_BNV = (decayed * k_BNK[..., None]).sum(2)
    delta_BNV = beta[:, 0, :, None] * (v[:, 0].astype(wide) - seen_BNV)
    new = decayed + k_BNK[..., None] * delta_BNV[:, :, None]
    out_BNV = (new * q_BNK[..., None]).sum(2)
    used_B = until[:, 0] > 0
    out = jnp.where(used_B[:, None, None], out_BNV, 0.0).astype(v.dtype)
    return out[:, None], jnp.where(used_B[:, None, None, None], new, state)
