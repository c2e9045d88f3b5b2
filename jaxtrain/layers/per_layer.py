"""Per-layer inputs of Gemma 3n and 4: features of every token for each layer.

    e[l] = (norm(W_l x0 / sqrt(D)) + table[token, l] sqrt(P)) / sqrt(2)      once, for all layers
    x + norm(W_out (act(W_gate x) * e[l]))                                   at the end of layer l

x0 are the scaled embeddings, or features of images. Shapes: B rows, T tokens, D model, L layers, P
numbers of a layer, E = L P.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.distributed.sharding import constrain
from jaxtrain.layers.embed import Embed
from jaxtrain.layers.linear import LayerInit, Linear
from jaxtrain.layers.mlp import gated
from jaxtrain.layers.norm import RMSNorm


class PerLayerInputs(nnx.Module):
    """(tokens [B, T], x0 [B, T, D]) -> e [L, B, T, P]."""

    def __init__(
        self,
        num_embeddings: int,
        num_features: int,
        num_layers: int,
        size: int,
        *,
        norm: type[RMSNorm],
        eps: float,
        init: LayerInit,
    ):
        self.embed = Embed(num_embeddings, num_layers * size, init=init)
        self.projection = Linear(num_features, num_layers * size, axes=("embed", None), init=init)
        self.norm = norm(size, eps=eps, param_dtype=init.param_dtype)
        self.num_layers = num_layers

    def __call__(
        self, tokens_BT: jax.Array, x_BTD: jax.Array, frozen_BT: jax.Array | None = None
    ) -> jax.Array:
        """frozen: True at tokens whose rows of the table get no gradient."""

        def split(y: jax.Array) -> jax.Array:
            y_BTLP = y.reshape(*tokens_BT.shape, self.num_layers, -1)
            return constrain(y_BTLP, "rows", "sequence", None, None)

        # Plain numbers take the dtype of what they are multiplied with.
        projected_BTLP = self.norm(split(self.projection(x_BTD) * x_BTD.shape[-1] ** -0.5))
        embedded_BTE = self.embed(tokens_BT)
        if frozen_BT is not None:
            constant_BTE = jax.lax.stop_gradient(embedded_BTE)
            embedded_BTE = jnp.where(frozen_BT[..., None], constant_BTE, embedded_BTE)
        embedded_BTLP = split(embedded_BTE)
        embedded_BTLP *= jnp.asarray(embedded_BTLP.shape[-1] ** 0.5, embedded_BTLP.dtype)
        return jnp.moveaxis((projected_BTLP + embedded_BTLP) * 2**-0.5, 2, 0)


class PerLayerGate(nnx.Module):
    """(x [B, T, D], e[l] [B, T, P]) -> what layer l adds to x."""

    def __init__(
        self,
        num_features: int,
        size: int,
        *,
        activation: str,
        norm: type[RMSNorm],
        eps: float,
        init: LayerInit,
    ):
        linear = functools.partial(Linear, init=init)
        self.gate = linear(num_features, size, axes=("embed", None))
        self.out = linear(size, num_features, axes=(None, "embed"))
        self.norm = norm(num_features, eps=eps, param_dtype=init.param_dtype)
        self.activation = activation

    def __call__(self, x_BTD: jax.Array, layer_input_BTP: jax.Array) -> jax.Array:
        return self.norm(self.out(gated(self.gate(x_BTD), layer_input_BTP, self.activation)))
