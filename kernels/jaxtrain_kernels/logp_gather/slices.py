"""A vocabulary split over mesh axes, inside shard_map: whose target, and one result from many."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain_kernels.logp_gather.reference import LogProbs

Axis = str | tuple[str, ...] | None


def local_targets(targets: jax.Array, size: int, axis: Axis) -> tuple[jax.Array, jax.Array]:
    """(targets counted in this device's slice of `size` rows, bool: are they here?)."""
    if axis is None:
        return targets, jnp.ones(targets.shape, bool)
    local = targets - lax.axis_index(axis) * size
    return local, (local >= 0) & (local < size)


def across(reduce, x: jax.Array, axis: Axis) -> jax.Array:
    """`reduce` (psum, pmax) over the axes that split the vocabulary, if any do."""
    return x if axis is None else reduce(x, axis)


def join(part: LogProbs, is_local: jax.Array, axis: Axis) -> LogProbs:
    """The whole vocabulary's LogProbs from those of each slice; differentiable.

    `part.logp` counts where `is_local`.
    """
    top = lax.pmax(lax.stop_gradient(part.lse), axis)
    lse = top + jnp.log(lax.psum(jnp.exp(part.lse - top), axis))
    share = jnp.exp(part.lse - lse)
    # A slice's expected logit is its lse - entropy; taken relative to the whole's log-sum-exp, so
    # that the entropy is no difference of large numbers.
    entropy = lax.psum(share * (part.entropy + lse - part.lse), axis)
    logp = lax.psum(jnp.where(is_local, part.logp + part.lse - lse, 0.0), axis)
    best = lax.pmax(lax.stop_gradient(part.top + part.lse - lse), axis)
    return LogProbs(logp, entropy, lse, best)
