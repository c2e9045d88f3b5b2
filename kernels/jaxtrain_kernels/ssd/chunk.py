"""State space duality inside of chunks (Dao and Gu 2024, arXiv:2405.21060), and its gradient by
hand.

Letters: L tokens of a chunk (i, j), G groups, R heads of each, S state dims, P head dims. Leading
dims are free. With a = cumsum(A dt), D_ij = e^(a_i - a_j) for i >= j, M_ij = (C_i . B_j) D_ij dt_j,
and the state H that comes in:

    y = e^a (C H) + M x
    H_out = e^(a_L) H + B^T (e^(a_L - a) dt x)

Products are of the inputs' dtype with sums in float32; the state, a and D stay there. Rows behind
the last token of a chunk are all zero and change nothing.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain_kernels.recurrence.decay import decays, dot


class SsdChunk(NamedTuple):
    """Inputs of a chunk, and results that need no state."""

    C: jax.Array
    """[..., G, L, S], and B the same."""
    B: jax.Array
    x: jax.Array
    """[..., G, R, L, P]."""
    dt: jax.Array
    """[..., G, R, L]; wide, and a the same."""
    a: jax.Array
    M: jax.Array
    """[..., G, R, L, L], in the inputs' dtype."""
    brought: jax.Array
    """[..., G, R, S, P]: what the chunk adds to the state; wide."""


def prepare(C, B, x, dt, log_decay) -> SsdChunk:
    """C, B [..., G, L, S], x [..., G, R, L, P], dt and log_decay = A dt [..., G, R, L, 1]."""
    dtype, dt = x.dtype, dt[..., 0]
    a = jnp.cumsum(log_decay[..., 0], -1)
    seen = dot("...is,...js->...ij", C, B, dtype)[..., None, :, :]
    M = (seen * decays(a) * dt[..., None, :]).astype(dtype)
    rest = jnp.exp(a[..., -1:] - a) * dt
    brought = dot("...gjs,...grjp->...grsp", B, rest[..., None] * x.astype(a.dtype), dtype)
    return SsdChunk(C, B, x, dt, a, M, brought)


def enter(chunk: SsdChunk, H: jax.Array) -> tuple[None, jax.Array]:
    """(None, the state behind the chunk) for the state [..., G, R, S, P] before."""
    return None, jnp.exp(chunk.a[..., -1:])[..., None] * H + chunk.brought


def outputs(chunk: SsdChunk, H: jax.Array, _: None = None) -> jax.Array:
    """y [..., G, R, L, P] for the state before the chunk."""
    dtype = chunk.x.dtype
    before = jnp.exp(chunk.a)[..., None] * dot("...gis,...grsp->...grip", chunk.C, H, dtype)
    return before + dot("...ij,...jp->...ip", chunk.M, chunk.x, dtype)


def leave(chunk: SsdChunk, d_y: jax.Array, d_H: jax.Array) -> tuple[None, jax.Array]:
    """Backwards through a chunk: (None, gradient of the state before) from those of y and of the
    state behind."""
    seen = jnp.exp(chunk.a)[..., None] * d_y
    before = jnp.exp(chunk.a[..., -1:])[..., None] * d_H
    return None, before + dot("...gis,...grip->...grsp", chunk.C, seen, chunk.x.dtype)


def gradients(chunk: SsdChunk, H, _made, d_y, _left, d_H, behind):
    """Gradients of C, B, x, dt and log_decay, from the states before and behind the chunk and those
    of y and of the state behind."""
    C, B, x, dt, a, M, _ = chunk
    dtype, wide = x.dtype, a.dtype
    # What a token leaves behind it, but for its dt.
    rest = jnp.exp(a[..., -1:] - a)[..., None]
    pulled = rest * dot("...gjs,...grsp->...grjp", B, d_H, dtype)
    d_x = dot("...ij,...ip->...jp", M, d_y, dtype) + dt[..., None] * pulled
    d_M = dot("...ip,...jp->...ij", d_y, x, dtype) * decays(a)
    d_C = dot("...grij,...gjs->...gris", d_M * dt[..., None, :], B, dtype)
    d_C += jnp.exp(a)[..., None] * dot("...grip,...grsp->...gris", d_y, H, dtype)
    per_dt = dot("...grij,...gis->...grjs", d_M, C, dtype)
    per_dt += rest * dot("...grjp,...grsp->...grjs", x, d_H, dtype)
    wide_C, wide_B = (x_part[..., None, :, :].astype(wide) for x_part in (C, B))
    d_dt = (wide_B * per_dt).sum(-1)
    d_a = (wide_C * d_C).sum(-1) - dt * d_dt
    d_a = d_a.at[..., -1].add((d_H * behind).sum((-2, -1)))
    d_log_decay = jnp.flip(jnp.cumsum(jnp.flip(d_a, -1), -1), -1)
    d_B = (dt[..., None] * per_dt).sum(-3)
    return d_C.sum(-3), d_B, d_x, d_dt[..., None], d_log_decay[..., None]
