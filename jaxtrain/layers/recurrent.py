"""Shared by layers with a convolution before a state: which tokens count, and the convolution's
tail.

Letters: B rows, T tokens, H key heads or groups, F features of one.
"""

import jax
import jax.numpy as jnp
from jaxtrain_kernels import Context


def used_until(context: Context) -> jax.Array:
    """`until` of packed rows, 0 in padding; int32 [B, T]."""
    return jnp.where(context.real(), context.until, 0)


def kept_until(count_B: jax.Array, T: int) -> jax.Array:
    """`until` of rows of T new tokens of which the first `count` are accepted; int32 [B, T]."""
    token_T = jnp.arange(T, dtype=jnp.int32)
    return jnp.where(token_T < count_B[:, None], T, 0).astype(jnp.int32)


def move_tail(tail_BWHF: jax.Array, m_BTHF: jax.Array, count_B: jax.Array) -> jax.Array:
    """The last inputs of the convolution behind the first `count` new ones, as many as before."""
    longer = jnp.concatenate([tail_BWHF, m_BTHF.astype(tail_BWHF.dtype)], axis=1)
    places = count_B[:, None] + jnp.arange(tail_BWHF.shape[1], dtype=jnp.int32)
    return jnp.take_along_axis(longer, places[:, :, None, None], axis=1)
