"""Mamba's recurrence in plain XLA: the walk of recurrence/walk.py with short chunks, whose tokens
are run through one after the other, those of many chunks at once.

No product of matrices is in it: a channel forgets each of its S numbers at another rate, so what is
left of a token at a later one is a number for each of both.

Letters: L tokens of a chunk, S numbers of a state, F channels. Leading dims are free.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain_kernels.recurrence.walk import ChunkRule, run


class ScanChunk(NamedTuple):
    """Inputs of a chunk, all of them wide, and results that need no state."""

    C: jax.Array
    """[..., L, S], and B the same."""
    B: jax.Array
    x: jax.Array
    """[..., L, F], and dt the same."""
    dt: jax.Array
    A: jax.Array
    """[..., S, F]."""
    brought: jax.Array
    """[..., S, F]: what the chunk adds to the state."""


def prepare(C, B, x, dt, A) -> ScanChunk:
    """C, B [..., 1, L, S], x, dt [..., 1, 1, L, F], A [S, F]."""
    C, B, x = (
        part.astype(A.dtype) for part in (C[..., 0, :, :], B[..., 0, :, :], x[..., 0, 0, :, :])
    )
    A = jnp.broadcast_to(A, (*x.shape[:-2], *A.shape))
    inputs = (C, B, x, dt[..., 0, 0, :, :], A)
    return ScanChunk(*inputs, run_tokens(jnp.zeros_like(A), *inputs)[0])


def run_tokens(H, C, B, x, dt, A):
    """(the state behind the last token, y [..., L, F]) for the state [..., S, F] before."""

    def step(H, token):
        C, B, x, dt = token
        H = jnp.exp(A * dt[..., None, :]) * H + B[..., None] * (dt * x)[..., None, :]
        return H, (C[..., None] * H).sum(-2)

    H, y = jax.lax.scan(step, H, tuple(jnp.moveaxis(part, -2, 0) for part in (C, B, x, dt)))
    return H, jnp.moveaxis(y, 0, -2)


def enter(chunk: ScanChunk, H: jax.Array) -> tuple[None, jax.Array]:
    """(None, the state behind the chunk) for the state [..., 1, 1, S, F] before."""
    behind = jnp.exp(chunk.A * chunk.dt.sum(-2)[..., None, :]) * H[..., 0, 0, :, :] + chunk.brought
    return None, behind[..., None, None, :, :]


def outputs(chunk: ScanChunk, H: jax.Array, _: None = None) -> jax.Array:
    """y [..., 1, 1, L, F] for the state before the chunk."""
    return run_tokens(H[..., 0, 0, :, :], *chunk[:5])[1][..., None, None, :, :]


def leave(chunk: ScanChunk, d_y: jax.Array, d_H: jax.Array) -> tuple[None, jax.Array]:
    """Backwards through a chunk: (None, gradient of the state before) from those of y and of the
    state behind."""

    def step(d_H, token):
        C, dt, d_y = token
        return jnp.exp(chunk.A * dt[..., None, :]) * (d_H + C[..., None] * d_y[..., None, :]), None

    parts = (chunk.C, chunk.dt, d_y[..., 0, 0, :, :])
    tokens = tuple(jnp.moveaxis(part, -2, 0) for part in parts)
    before, _ = jax.lax.scan(step, d_H[..., 0, 0, :, :], tokens, reverse=True)
    return None, before[..., None, None, :, :]


def gradients(chunk: ScanChunk, H, _made, d_y, _left, d_H, _behind):
    """Gradients of C, B, x, dt and A, from the state before the chunk and those of y and of the
    state behind."""
    d_H, d_y = (part[..., 0, 0, :, :] for part in (d_H, d_y))
    _, pull = jax.vjp(lambda *inputs: run_tokens(H[..., 0, 0, :, :], *inputs), *chunk[:5])
    d_C, d_B, d_x, d_dt, d_A = pull((d_H, d_y))
    heads = (part[..., None, :, :] for part in (d_C, d_B))
    return *heads, *(part[..., None, None, :, :] for part in (d_x, d_dt)), d_A


RULE = ChunkRule(prepare, enter, outputs, leave, gradients, shared=1)


def selective_scan(x, dt, A, B, C, until, prev=None, *, state, chunk=16, lanes=None):
    """Implement `jaxtrain_kernels.selective_scan`; `chunk` and `lanes` override the schedule."""
    T = x.shape[1]
    if T == 1 and prev is None:
        wide = (part.astype(A.dtype) for part in (C, B, x))
        H, y = run_tokens(state, *wide, dt, A[None])
        used_r = until[:, :1, None] > 0
        return jnp.where(used_r, y, 0.0).astype(x.dtype), jnp.where(used_r, H, state)
    heads = (part[:, :, None] for part in (C, B))
    inputs = (*heads, *(part[:, :, None, None] for part in (x, dt)), A)
    y, last = run(RULE, inputs, state[:, None, None], until, prev, chunk, lanes)
    return y[:, :, 0, 0], last[:, 0, 0] if prev is None else None
