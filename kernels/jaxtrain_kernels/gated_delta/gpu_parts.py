"""The parts of the Hopper backend in XLA, a chunk at a time: what its kernels are tested against.

The layouts are those of `gpu_order`; the maths and the rounding are those of `chunk`.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain_kernels.gated_delta import chunk as maths
from jaxtrain_kernels.gated_delta.gpu_order import C, Links, Ordered
from jaxtrain_kernels.recurrence.chunks import NEIGHBOUR, ROOT


def prepare(ordered: Ordered, links: Links) -> tuple[jax.Array, jax.Array]:
    """T and P [B, n, N, C, C]; rows of P that are no tokens are 0."""
    part = _chunks(ordered)
    B, n, N, _ = ordered.beta.shape
    own = jnp.arange(C, dtype=jnp.int32) < links.length[..., None]
    P = part.P.reshape(B, n, N, C, C)
    P = jnp.where(own[:, :, None, :, None], P, jnp.zeros((), P.dtype))
    return part.T.reshape(P.shape), P


def _chunks(ordered: Ordered) -> maths.Chunk:
    """[B, n, H, R, ...]."""
    q, k, v, beta, G, T, P = ordered
    B, n, N, _ = G.shape
    H = q.shape[2]
    by_key = (x.reshape(B, n, C, H, -1).swapaxes(2, 3) for x in (q, k))
    q, k = by_key
    v = jnp.moveaxis(v.reshape(B, n, C, H, N // H, -1), 2, 4)
    beta, G = (x.reshape(B, n, H, N // H, C) for x in (beta, G))
    if T is None:
        g = jnp.diff(G, axis=-1, prepend=jnp.zeros((), G.dtype))
        return maths.prepare(q, k, v, g, beta)
    T, P = (x.reshape(B, n, H, N // H, C, C) for x in (T, P))
    return maths.Chunk(q, k, v, beta, G, T, P)


def walk(links: Links, ordered: Ordered, state, slots: int):
    """(o [B, n C, N, V], the states before the chunks [B, n, N, K, V] and v' like o, both in q's
    dtype, and the state behind each list float32 [L, N, K, V]); state float32 [B, N, K, V]."""
    part = _chunks(ordered)
    B, n, H, R, _ = part.G.shape
    wide = state.reshape(B, H, R, *state.shape[2:])
    out = jnp.zeros((B, n, *part.v.shape[2:]), jnp.float32)
    S_before = jnp.zeros((B, n, *wide.shape[1:]), jnp.float32)

    def go(one_list, carry):
        row, first = links.row[one_list], links.first[one_list]

        def step(i, carry):
            (here, kept), out, new, before = carry
            at = (row, first + i)
            one = jax.tree.map(lambda x: x[at], part)
            source, keep = links.source[at], links.keep[at]
            S = jnp.where(source == NEIGHBOUR, here, kept[jnp.maximum(source, 0)])
            S = jnp.where(source == ROOT, wide[row], S)
            v_new, behind = maths.enter(one, S)
            o = maths.outputs(one, S, v_new)
            own = (jnp.arange(C, dtype=jnp.int32) < links.length[at])[:, None]
            o, v_new = (jnp.where(own, x, 0.0) for x in (o, v_new))
            kept = kept.at[keep].set(behind, mode="drop")
            return (behind, kept), out.at[at].set(o), new.at[at].set(v_new), before.at[at].set(S)

        *arrays, last = carry
        kept = jnp.zeros((slots, *wide.shape[1:]), jnp.float32)
        carry = ((wide[row], kept), *arrays)
        (here, _), *arrays = lax.fori_loop(0, links.count[one_list], step, carry)
        return *arrays, last.at[one_list].set(here)

    L = len(links.row)
    last = jnp.zeros((L, *wide.shape[1:]), jnp.float32)
    out, new, S, last = lax.fori_loop(0, L, go, (out, out, S_before, last))

    def by_token(x):
        return jnp.moveaxis(x, 4, 2).reshape(B, n * C, H * R, -1).astype(ordered.v.dtype)

    S = S.reshape(B, n, H * R, *S.shape[-2:]).astype(ordered.v.dtype)
    return by_token(out), S, by_token(new), last.reshape(L, H * R, *last.shape[-2:])
