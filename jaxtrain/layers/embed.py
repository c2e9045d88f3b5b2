"""Embed: token ids to vectors; the same table is the head of a tied model."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.layers.linear import Dtype
from jaxtrain.parallel.rules import constrain


class Embed(nnx.Module):
    """embedding [V, D]; `head()` hands it out as the output projection, rows are tokens."""

    def __init__(
        self,
        num_embeddings: int,
        num_features: int,
        *,
        init_std: float = 0.02,
        param_dtype: Dtype = jnp.float32,
        dtype: Dtype = jnp.float32,
        rngs: nnx.Rngs,
    ):
        shape = (num_embeddings, num_features)
        table_VD = init_std * jax.random.normal(rngs.params(), shape, param_dtype)
        self.embedding = nnx.Param(table_VD, axes=("vocab", "embed"))
        self.dtype = jnp.dtype(dtype)

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        x_BTD = self.embedding[...][tokens_BT].astype(self.dtype)
        return constrain(x_BTD, "rows", "length", "features")
