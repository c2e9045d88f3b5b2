"""Attention sinks: a logit of each query head that takes its share of every softmax and has no
value (gpt-oss; Xiao et al. 2023, arXiv:2309.17453). Exact from what any flash kernel puts out.

With s the sink, L' the log-sum-exp of a query's scores and O' what it found among them:

    L = log(exp(L') + exp(s)),  O = O' exp(L' - L)

The backward kernels need no change: given (O, L) in the place of (O', L'), the weights
exp(score - L) and delta = dO . O are those of the softmax with the sink. The sink's own gradient is
-sum over queries of exp(s - L) delta.
"""

import jax
import jax.numpy as jnp


def absorb(lse: jax.Array, sinks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(L, what O' is multiplied with). lse: natural, +inf where a query saw nothing, as kernels
    put it out; sinks: against it, in the same dtype."""
    found = jnp.where(lse == jnp.inf, -jnp.inf, lse)
    total = jnp.logaddexp(found, sinks)
    return total, jnp.exp(found - total)


def gradient(sinks: jax.Array, lse: jax.Array, delta: jax.Array) -> jax.Array:
    """Each query's share of the sinks' gradient, of L and delta; to be summed over queries."""
    return -jnp.exp(sinks - lse) * delta
