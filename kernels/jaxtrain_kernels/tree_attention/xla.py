"""Tree attention in plain XLA, a block of queries at a time, forward and backward.

Runs everywhere. At most [B, N, block, S] scores are alive; the backward recomputes them from the
saved log-sum-exp. While keys are causal (`since` is None), a block never reads keys behind its last
query: blocks are grouped into stripes that share a static key prefix, which saves most of the
masked half and keeps the program small. Inside, arrays are head-major: q [B, K, G, T, H] with
G = N / K query heads per key head, and k, v [B, K, S, H].
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxtrain_kernels.precision import accumulator
from jaxtrain_kernels.tree_attention import sinks as sink_rule
from jaxtrain_kernels.tree_attention.reference import visible

MAX_SCORES = 2**26  # scores alive at once (256 MiB in float32), all rows and heads together
ONE_BLOCK = 512  # queries; below, a loop costs more than the masked half saves
STRIPES = 4


class Stripe(NamedTuple):
    """`blocks` blocks of `size` queries from row `first`, which read keys [0, keys)."""

    first: int
    blocks: int
    size: int
    keys: int


class Options(NamedTuple):
    """Static parameters of the program, besides shapes."""

    window: int | None
    softcap: float | None
    scale: float
    block: int


def attention(q, k, v, context, *, window=None, softcap=None, scale, sinks=None, block=None):
    """Implement `jaxtrain_kernels.attention`; `block` overrides the number of queries of a
    block."""
    B, T, N, H = q.shape
    S, K = k.shape[1:3]
    if block is None:
        block = choose_block(B, T, N, S)
    options = Options(window, softcap, scale, block)
    q_BKGTH = q.reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4)
    out_BKGTH = _attention(
        options, q_BKGTH, k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3), context, sinks
    )
    return out_BKGTH.transpose(0, 3, 1, 2, 4).reshape(B, T, N, -1)


def choose_block(B: int, T: int, N: int, S: int) -> int:
    """Queries per block: all of a short row, else a power of two within the score budget."""
    if T <= ONE_BLOCK:
        return T
    block = ONE_BLOCK
    while block > 64 and B * N * S * block > MAX_SCORES:
        block //= 2
    return block


def plan(T: int, S: int, block: int, causal: bool) -> list[Stripe]:
    """Cut T queries into stripes of equal blocks, and a last shorter block."""
    full, rest = divmod(T, block)
    groups = min(STRIPES, full) if causal else min(1, full)
    stripes, start = [], 0
    for group in range(groups):
        stop = full * (group + 1) // groups
        # Causal queries of a stripe see no key past its end: stripes skip most scores above the
        # diagonal.
        keys = min(S, stop * block) if causal else S
        stripes.append(Stripe(start * block, stop - start, block, keys))
        start = stop
    if rest:
        stripes.append(Stripe(full * block, 1, rest, min(S, T) if causal else S))
    return stripes


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(options, q, k, v, context, sinks):
    return _forward(options, q, k, v, context, sinks)[0]


def _forward(options, q, k, v, context, sinks):
    """Output in q's dtype and the log-sum-exp [B, K, G, T]: +inf where a softmax is empty."""

    def one_block(q_BKGIH, rows, positions, stripe):
        key, value, part = _keys(stripe, k, v, context)
        score, seen = _scores(options, q_BKGIH, key, rows, positions, part)
        score = jnp.where(seen, score, -jnp.inf)
        top = score.max(-1)
        # A query that sees nothing: exp(-inf - 0) is 0, where -inf - -inf would be NaN.
        top = jnp.where(top == -jnp.inf, 0.0, top)
        weight = jnp.exp(score - top[..., None])
        total = weight.sum(-1)
        empty = total == 0
        out = _dot(weight.astype(value.dtype), value, ((4,), (2,)))
        out = out / jnp.where(empty, 1.0, total)[..., None]
        # +inf, so that the backward's exp(score - lse) is 0 there and never inf - inf.
        lse = jnp.where(empty, jnp.inf, top + jnp.log(total))
        if sinks is not None:
            lse, share = sink_rule.absorb(lse, _by_head(sinks, q, lse.dtype))
            out *= share[..., None]
        return out.astype(q.dtype), lse

    outs, lses = [], []
    for stripe in plan(q.shape[3], k.shape[2], options.block, context.since is None):
        run = functools.partial(one_block, stripe=stripe)
        inputs = (_blocks(q, 3, stripe), _rows(stripe), _positions(context, stripe))
        if stripe.blocks == 1:
            out, lse = run(*jax.tree.map(lambda x: x[0], inputs))
        else:
            out, lse = lax.map(lambda block, run=run: run(*block), inputs)
            out, lse = _joined(out, 3), _joined(lse, 3)
        outs.append(out)
        lses.append(lse)
    return jnp.concatenate(outs, 3), jnp.concatenate(lses, 3)


def _attention_fwd(options, q, k, v, context, sinks):
    out, lse = _forward(options, q, k, v, context, sinks)
    # A remat policy that saves this name spares the backward a second forward.
    out, lse = checkpoint_name(out, "attention_out"), checkpoint_name(lse, "attention_lse")
    return out, (q, k, v, context, sinks, lse)


def _attention_bwd(options, residuals, d_out):
    """dS = P (dP - rowsum(P dP)), block by block; dK and dV accumulate in float32.

    A block sees whole rows, so the row sum needs no saved output (and rounds less than with one).
    """
    q, k, v, context, sinks, lse = residuals
    compute = lse.dtype

    def one_block(carry, inputs, stripe):
        dk, dv = carry
        q_BKGIH, do, lse, rows, positions = inputs
        key, value, part = _keys(stripe, k, v, context)
        score, seen = _scores(options, q_BKGIH, key, rows, positions, part)
        weight = jnp.where(seen, jnp.exp(score - lse[..., None]), 0.0)
        d_weight = _dot(do, value, ((4,), (3,)))
        delta = (weight * d_weight).sum(-1)
        d_score = weight * (d_weight - delta[..., None])
        if options.softcap is not None:
            # `score` is capped: the derivative of c tanh(x / c) is 1 - tanh(x / c)^2.
            d_score *= 1.0 - jnp.square(score / options.softcap)
        d_score = (d_score * options.scale).astype(q.dtype)
        dv += _dot(weight.astype(do.dtype), do, ((2, 3), (2, 3)))
        dk += _dot(d_score, q_BKGIH, ((2, 3), (2, 3)))
        dq = _dot(d_score, key, ((4,), (2,)))
        return (dk, dv), (dq.astype(q.dtype), delta)

    dk, dv = jnp.zeros(k.shape, compute), jnp.zeros(v.shape, compute)
    dqs, deltas = [], []
    for stripe in plan(q.shape[3], k.shape[2], options.block, context.since is None):
        run = functools.partial(one_block, stripe=stripe)
        carry = (dk[:, :, : stripe.keys], dv[:, :, : stripe.keys])
        arrays = (_blocks(x, 3, stripe) for x in (q, d_out, lse))
        inputs = (*arrays, _rows(stripe), _positions(context, stripe))
        if stripe.blocks == 1:
            carry, (dq, delta) = run(carry, jax.tree.map(lambda x: x[0], inputs))
        else:
            carry, (dq, delta) = lax.scan(run, carry, inputs)
            dq, delta = _joined(dq, 3), _joined(delta, 3)
        dk = lax.dynamic_update_slice(dk, carry[0], (0, 0, 0, 0))
        dv = lax.dynamic_update_slice(dv, carry[1], (0, 0, 0, 0))
        dqs.append(dq)
        deltas.append(delta)
    d_sinks = None
    if sinks is not None:
        delta = jnp.concatenate(deltas, 3)
        sink_grads = sink_rule.gradient(_by_head(sinks, q, compute), lse, delta)
        d_sinks = sink_grads.sum((0, 3)).reshape(-1).astype(sinks.dtype)
    return jnp.concatenate(dqs, 3), dk.astype(k.dtype), dv.astype(v.dtype), None, d_sinks


_attention.defvjp(_attention_fwd, _attention_bwd)


def _by_head(sinks, q_BKGTH, dtype):
    """[N] -> [1, K, G, 1]."""
    return sinks.astype(dtype).reshape(1, *q_BKGTH.shape[1:3], 1)


def _scores(options, q_BKGIH, k_BKSH, rows, positions, context):
    """Capped scores [B, K, G, I, S] in the compute dtype and their mask [B, 1, 1, I, S]."""
    score = _dot(q_BKGIH, k_BKSH, ((4,), (3,))) * options.scale
    if options.softcap is not None:
        score = options.softcap * jnp.tanh(score / options.softcap)
    # The mask does not depend on heads; it is broadcast, not stored per head.
    seen = visible(rows, context._replace(positions=positions), options.window)
    return score, seen[:, None, None]


def _dot(lhs, rhs, contract):
    """Batched over B and K, accumulated in float32 (float64 for float64)."""
    compute = accumulator(lhs.dtype)
    return lax.dot_general(lhs, rhs, (contract, ((0, 1), (0, 1))), preferred_element_type=compute)


def _keys(stripe, k, v, context):
    """The stripe's prefix of keys: k, v and the context's key arrays."""
    n = stripe.keys
    part = context._replace(
        until=context.until[:, :n],
        since=None if context.since is None else context.since[:, :n],
        key_positions=None if context.key_positions is None else context.key_positions[:, :n],
    )
    return k[:, :, :n], v[:, :, :n], part


def _rows(stripe):
    last = stripe.first + stripe.blocks * stripe.size
    return jnp.arange(stripe.first, last, dtype=jnp.int32).reshape(stripe.blocks, stripe.size)


def _positions(context, stripe):
    return None if context.positions is None else _blocks(context.positions, 1, stripe)


def _blocks(x, axis, stripe):
    """[..., T, ...] -> [blocks, ..., size, ...] of one stripe."""
    x = lax.slice_in_dim(x, stripe.first, stripe.first + stripe.blocks * stripe.size, axis=axis)
    shape = (*x.shape[:axis], stripe.blocks, stripe.size, *x.shape[axis + 1 :])
    return jnp.moveaxis(x.reshape(shape), axis, 0)


def _joined(x, axis):
    """The inverse of `_blocks`."""
    x = jnp.moveaxis(x, 0, axis)
    return x.reshape(*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :])
