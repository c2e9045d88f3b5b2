"""The gated delta rule inside of chunks (the WY form of Yang et al. 2024, arXiv:2412.06464), and
its gradient by hand.

Letters: C tokens of a chunk (i, j), H key heads, R value heads of each, K and V their dims. Leading
dims are free. With G = cumsum(g), D_ij = e^(G_i - G_j) for i >= j, A_ij = beta_i (k_i . k_j) D_ij
for i > j, T = (I + A)^-1, P_ij = (q_i . k_j) D_ij for i >= j, and the state S that comes in:

    x = beta v - beta e^G (k S);  v' = T x;  o = e^G (q S) + P v'
    S_out = e^(G_C) S + k^T (e^(G_C - G) v')

Products are of the inputs' dtype with sums in float32; the state, G, D and T's solve stay there.
Rows behind the last token of a chunk are all zero and change nothing.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain_kernels.recurrence.decay import below_diagonal, decays, dot


class DeltaChunk(NamedTuple):
    """Inputs of a chunk, and results that need no state."""

    q: jax.Array
    """[..., H, C, K], and k the same."""
    k: jax.Array
    v: jax.Array
    """[..., H, R, C, V]."""
    beta: jax.Array
    """[..., H, R, C]; wide."""
    G: jax.Array
    """[..., H, R, C]; wide."""
    T: jax.Array
    """[..., H, R, C, C], in the inputs' dtype, and P the same."""
    P: jax.Array


def invert(A: jax.Array) -> jax.Array:
    """(I + A)^-1 of strictly lower A [..., C, C], C a power of two: diagonal blocks of 1, 2, 4 ...
    joined. Powers of A itself overflow where keys repeat."""
    # Not lax.linalg.triangular_solve: on CPUs it takes fifty times as long at C = 64.
    lead, C, size = A.shape[:-2], A.shape[-1], 1
    X = jnp.ones((*lead, C, 1, 1), A.dtype)
    while size < C:
        pairs = A.reshape(*lead, C // (2 * size), 2, size, C // (2 * size), 2, size)
        below = jnp.diagonal(pairs[..., :, 1, :, :, 0, :], axis1=-4, axis2=-2)
        below = jnp.moveaxis(below, -1, -3)
        first, second = X[..., 0::2, :, :], X[..., 1::2, :, :]
        product = dot("...ij,...jk->...ik", second, below, A.dtype)
        corner = -dot("...ij,...jk->...ik", product, first, A.dtype)
        top = jnp.concatenate([first, jnp.zeros_like(first)], -1)
        X = jnp.concatenate([top, jnp.concatenate([corner, second], -1)], -2)
        size *= 2
    return X[..., 0, :, :]


def prepare(q, k, v, g, beta) -> DeltaChunk:
    """q, k [..., H, C, K], v [..., H, R, C, V], g and beta [..., H, R, C]."""
    dtype = q.dtype
    G = jnp.cumsum(g, -1)
    D = decays(G)
    kk = dot("...ik,...jk->...ij", k, k, dtype)[..., None, :, :]
    qk = dot("...ik,...jk->...ij", q, k, dtype)[..., None, :, :]
    A = beta[..., None] * kk * D
    A = jnp.where(below_diagonal(A, 1), A, 0.0)
    return DeltaChunk(q, k, v, beta, G, invert(A).astype(dtype), (qk * D).astype(dtype))


def enter(chunk: DeltaChunk, S: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(v' [..., H, R, C, V], the state behind the chunk) for the state [..., H, R, K, V] before."""
    q, k, v, beta, G, T, _ = chunk
    dtype = q.dtype
    seen = dot("...hik,...hrkv->...hriv", k, S, dtype)
    x = beta[..., None] * (v.astype(G.dtype) - jnp.exp(G)[..., None] * seen)
    new = dot("...ij,...jv->...iv", T, x, dtype)
    last = G[..., -1:]
    S = jnp.exp(last)[..., None] * S
    S += dot("...hik,...hriv->...hrkv", k, jnp.exp(last - G)[..., None] * new, dtype)
    return new, S


def outputs(chunk: DeltaChunk, S: jax.Array, new: jax.Array) -> jax.Array:
    """o [..., H, R, C, V] for the state before the chunk and v'."""
    dtype = chunk.q.dtype
    seen = dot("...hik,...hrkv->...hriv", chunk.q, S, dtype)
    inside = dot("...ij,...jv->...iv", chunk.P, new, dtype)
    return jnp.exp(chunk.G)[..., None] * seen + inside


def leave(chunk: DeltaChunk, d_out: jax.Array, d_S: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Backwards through a chunk: (gradient of x [..., H, R, C, V], of the state before) from those
    of o and of the state behind."""
    q, k, _, beta, G, T, P = chunk
    dtype, eG, last = q.dtype, jnp.exp(G)[..., None], G[..., -1:]
    d_new = dot("...ij,...iv->...jv", P, d_out, dtype)
    d_new += jnp.exp(last - G)[..., None] * dot("...hik,...hrkv->...hriv", k, d_S, dtype)
    d_x = dot("...ij,...iv->...jv", T, d_new, dtype)
    before = jnp.exp(last)[..., None] * d_S
    before += dot("...hik,...hriv->...hrkv", q, eG * d_out, dtype)
    before -= dot("...hik,...hriv->...hrkv", k, beta[..., None] * eG * d_x, dtype)
    return d_x, before


def gradients(chunk: DeltaChunk, S, new, d_out, d_x, d_S, behind):
    """Gradients of q, k, v, g and beta, from the states before and behind the chunk, v', and what
    `leave` took and gave."""
    q, k, v, beta, G, _, _ = chunk
    dtype, wide = q.dtype, G.dtype
    eG, rest, D = jnp.exp(G), jnp.exp(G[..., -1:] - G), decays(G)
    v = v.astype(wide)
    kk = dot("...ik,...jk->...ij", k, k, dtype)[..., None, :, :]
    d_P = dot("...iv,...jv->...ij", d_out, new, dtype) * D
    d_A = -dot("...iv,...jv->...ij", d_x, new, dtype) * D
    d_A = jnp.where(below_diagonal(d_A, 1), d_A, 0.0)
    Y = beta[..., None] * d_A
    d_kt = -dot("...hriv,...hrkv->...hrik", d_x, S, dtype)
    d_q = dot("...hrij,...hjk->...hrik", d_P, k, dtype)
    d_q += eG[..., None] * dot("...hriv,...hrkv->...hrik", d_out, S, dtype)
    d_k = dot("...hrij,...hik->...hrjk", d_P, q, dtype)
    d_k += rest[..., None] * dot("...hriv,...hrkv->...hrik", new, d_S, dtype)
    d_k += (beta * eG)[..., None] * d_kt
    d_k += dot("...hrij,...hjk->...hrik", Y, k, dtype) + dot("...hrij,...hik->...hrjk", Y, k, dtype)
    d_v = beta[..., None] * d_x
    wide_q, wide_k = (x[..., None, :, :].astype(wide) for x in (q, k))
    pull = (d_x * v).sum(-1)
    d_beta = pull + eG * (d_kt * wide_k).sum(-1) + (d_A * kk).sum(-1)
    # G enters every product with q and k as e^(G_i - G_j), so its gradient is the inner product of
    # q and dq minus that of k and dk; no [C, C] gradient of D is formed.
    d_G = (wide_q * d_q).sum(-1) - (wide_k * d_k).sum(-1) + 2 * beta * (d_beta - pull)
    # e^(G_C) scales the whole state, so the last token also gets <dS, S> of the state behind.
    d_G = d_G.at[..., -1].add((d_S * behind).sum((-2, -1)))
    # g_t enters all G_i with i >= t: a reversed cumulative sum.
    d_g = jnp.flip(jnp.cumsum(jnp.flip(d_G, -1), -1), -1)
    return d_q.sum(-3), d_k.sum(-3), d_v, d_g, d_beta
