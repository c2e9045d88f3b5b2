"""Score: a few numbers of a token's hidden state, where another head predicts the next token."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.layers.linear import LayerInit


class Score(nnx.Module):
    """weight [n, D] (+ bias [n]), as Hugging Face stores them; on every device whole.

    No Linear: adapters and quantized storage leave it alone, it is trained in full.
    """

    def __init__(self, num_features: int, num_scores: int, *, use_bias: bool, init: LayerInit):
        shape = (num_scores, num_features)
        weight_nD = init.normal(shape)
        self.weight = nnx.Param(weight_nD, axes=(None, None))
        self.bias = (
            nnx.Param(jnp.zeros(num_scores, init.param_dtype), axes=(None,)) if use_bias else None
        )

    def __call__(self, hidden: jax.Array) -> jax.Array:
        """[..., D] -> [..., n] in at least float32."""
        wide = jnp.promote_types(hidden.dtype, jnp.float32)
        weight_nD = self.weight[...].astype(hidden.dtype)
        scores = jnp.einsum("...D,nD->...n", hidden, weight_nD, preferred_element_type=wide)
        return scores if self.bias is None else scores + self.bias[...].astype(wide)
