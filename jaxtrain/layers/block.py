"""PreNormBlock: x + attention(norm(x)), then x + mlp(norm(x)); what most decoders here are.
SingleBlock: x + layer(norm(x)), one layer of either kind.

Attention is whatever mixes tokens: linear attention, too."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.layers.mixer import LayerInputs, Mixer, State, Tokenwise
from jaxtrain.layers.mlp import MLP
from jaxtrain.layers.moe import MoE
from jaxtrain.layers.norm import RMSNorm


class PreNormBlock(nnx.Module):
    """[B, T, D] -> [B, T, D]; `mlp` is dense or a mixture of experts, which notes its balance.
    residual_scale: what either is multiplied with before it is added."""

    def __init__(
        self,
        attention_norm: RMSNorm,
        attention: Mixer,
        mlp_norm: RMSNorm,
        mlp: MLP | MoE,
        residual_scale: float = 1.0,
    ):
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.residual_scale = residual_scale

    @property
    def mixer(self) -> Mixer:
        """What the stack asks about the block's state."""
        return self.attention

    def __call__(
        self, x_BTD: jax.Array, inputs: LayerInputs, state: State = None
    ) -> tuple[jax.Array, State, dict[str, jax.Array]]:
        h_BTD, state = self.attention(self.attention_norm(x_BTD), inputs, state)
        x_BTD = x_BTD + self._scaled(h_BTD)
        h_BTD, noted = feed_forward(self.mlp, self.mlp_norm(x_BTD), inputs)
        return x_BTD + self._scaled(h_BTD), state, noted

    def _scaled(self, h_BTD: jax.Array) -> jax.Array:
        return (
            h_BTD
            if self.residual_scale == 1
            else h_BTD * jnp.asarray(self.residual_scale, h_BTD.dtype)
        )


class SingleBlock(nnx.Module):
    """[B, T, D] -> [B, T, D]; `layer` mixes tokens, or reads each alone as an MLP does."""

    def __init__(self, norm: RMSNorm, layer: Mixer | MLP | MoE):
        self.norm = norm
        self.layer = layer

    @property
    def mixer(self) -> Mixer:
        """What the stack asks about the block's state."""
        return self.layer if isinstance(self.layer, Mixer) else Tokenwise()

    def __call__(
        self, x_BTD: jax.Array, inputs: LayerInputs, state: State = None
    ) -> tuple[jax.Array, State, dict[str, jax.Array]]:
        h_BTD, noted = self.norm(x_BTD), {}
        if isinstance(self.layer, Mixer):
            h_BTD, state = self.layer(h_BTD, inputs, state)
        else:
            h_BTD, noted = feed_forward(self.layer, h_BTD, inputs)
        return x_BTD + h_BTD, state, noted


def feed_forward(
    layer: MLP | MoE, x_BTD: jax.Array, inputs: LayerInputs
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """(what the layer makes of each token, what it notes)."""
    if isinstance(layer, MoE):
        return layer(x_BTD, inputs.context.real())
    return layer(x_BTD), {}
