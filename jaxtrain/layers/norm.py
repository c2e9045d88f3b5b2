"""RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467)."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.layers.linear import Dtype


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + eps) * scale over the last dim; statistics in at least float32.

    The normalised value is rounded to x's dtype before the scale is applied, as transformers does.
    """

    def __init__(
        self,
        num_features: int,
        *,
        eps: float,
        param_dtype: Dtype = jnp.float32,
    ):
        self.scale = nnx.Param(jnp.ones((num_features,), param_dtype), axes=("norm",))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        return normalise(x, self.scale[...], self.eps)


# Rematerialised on its own: the backward keeps x, which is there anyway, and none of the float32
# values in between, which take longer to store and load than to compute.
@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=2)
def normalise(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """The formula above, on arrays."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    normed = (wide * jax.lax.rsqrt(mean_square + eps)).astype(x.dtype)
    return normed * scale.astype(x.dtype)
