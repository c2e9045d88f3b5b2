"""Attention sinks: a logit of each query head that takes its share of every softmax and has no
value (gpt-oss; Xiao et al. 2023, arXiv:2309.17453). Exact from what any flash kernel puts out.

With s the sink, L' the log-sum-exp of a query's scores and O' what it found among them:

    L = log(exp(L') + exp(s)),  O = O' exp(L' - L)

The backward kernels need no change: given (O, L) in the place of (O', L'), the weights
exp(score - L) and delta = dO . O are those of the softmax with the sink. The sink's own gradient is
-sum over queries of exp(s - L) delta.
"""

import math

import jax
import jax.numpy as jnp

LN2 = math.log(2.0)  # log-sum-exps of GPU kernels are to base 2


def absorb(lse: jax.Array, sinks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(L, what O' is multiplied with). lse: natural, +inf where a query saw nothing, as kernels
    put it out; sinks: against it, in the same dtype."""
    finite_lse = jnp.where(lse == jnp.inf, -jnp.inf, lse)
    total = jnp.logaddexp(finite_lse, sinks)
    return total, jnp.exp(finite_lse - total)


def gradient(sinks: jax.Array, lse: jax.Array, delta: jax.Array) -> jax.Array:
    """Each query's share of the sinks' gradient, of L and delta; to be summed over queries."""
    return -jnp.exp(sinks - lse) * delta


def absorb_into(out: jax.Array, lse: jax.Array, sinks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(O, L) of a kernel's output [B, T, N, V] and base-2 log-sum-exp [B, N, T]; sinks [N]."""
    total, share_BNT = absorb(lse * LN2, _by_head(sinks))
    share_BTN1 = share_BNT.swapaxes(1, 2)[..., None]
    return (out.astype(jnp.float32) * share_BTN1).astype(out.dtype), total / LN2


def total_gradient(sinks: jax.Array, lse: jax.Array, delta: jax.Array) -> jax.Array:
    """[N] of sinks [N], from L to base 2 and delta, both [B, N, T]."""
    return gradient(_by_head(sinks), lse * LN2, delta).sum((0, 2)).astype(sinks.dtype)


def _by_head(sinks):
    """[N] -> [1, N, 1]."""
    return sinks.astype(jnp.float32)[None, :, None]
