"""Products inside of a chunk and how much of each token is left at each later one."""

import jax
import jax.numpy as jnp

from jaxtrain_kernels.precision import accumulator


def dot(spec: str, lhs: jax.Array, rhs: jax.Array, dtype) -> jax.Array:
    """einsum of operands in `dtype` with wide sums; float32 operands are not rounded on the way."""
    wide = accumulator(dtype)
    return jnp.einsum(
        spec,
        lhs.astype(dtype),
        rhs.astype(dtype),
        preferred_element_type=wide,
        precision=jax.lax.Precision.HIGHEST if dtype == wide else None,
    )


def decays(G: jax.Array) -> jax.Array:
    """D. The mask comes before exp: above the diagonal e^(G_i - G_j) may be infinite, and its
    gradient NaN."""
    apart = G[..., :, None] - G[..., None, :]
    return jnp.exp(jnp.where(below_diagonal(apart, 0), apart, -jnp.inf))


def below_diagonal(x: jax.Array, least: int) -> jax.Array:
    """Return bool [..., i, j]: i - j >= least."""
    i, j = (jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - axis) for axis in (2, 1))
    return i - j >= least
