"""Sums and means over the tokens of each branch, for losses that judge whole answers."""

import jax
import jax.numpy as jnp


def segment_sum(values_BT, mask_BT, owner_BT):
    """Sum of each branch's trained tokens, back on every token of the branch [B, T]."""
    length = values_BT.shape[1]
    inside_BT = jnp.where(owner_BT < 0, 0, owner_BT)

    def of_row(values_T, mask_T, owner_T):
        sums = jax.ops.segment_sum(jnp.where(mask_T, values_T, 0.0), owner_T, num_segments=length)
        return sums[owner_T]

    return jax.vmap(of_row)(values_BT, mask_BT, inside_BT)


def segment_mean(values_BT, mask_BT, owner_BT):
    """Mean of each branch's trained tokens, back on every token; 0 for a branch without any."""
    counts_BT = segment_sum(jnp.ones_like(values_BT), mask_BT, owner_BT)
    return segment_sum(values_BT, mask_BT, owner_BT) / jnp.maximum(counts_BT, 1.0)
