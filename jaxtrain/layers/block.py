"""PreNormBlock: x + attention(norm(x)), then x + mlp(norm(x)); what every decoder here is.

Attention is whatever mixes tokens: linear attention, too."""

import jax
from flax import nnx

from jaxtrain.layers.mixer import LayerInputs, Mixer, State
from jaxtrain.layers.mlp import GatedMLP
from jaxtrain.layers.moe import MoE
from jaxtrain.layers.norm import RMSNorm


class PreNormBlock(nnx.Module):
    """[B, T, D] -> [B, T, D]; `mlp` is dense or a mixture of experts, which notes its balance."""

    def __init__(
        self, attention_norm: RMSNorm, attention: Mixer, mlp_norm: RMSNorm, mlp: GatedMLP | MoE
    ):
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    @property
    def mixer(self) -> Mixer:
        """What the stack asks about the block's state."""
        return self.attention

    def __call__(
        self, x_BTD: jax.Array, inputs: LayerInputs, state: State = None
    ) -> tuple[jax.Array, State, dict[str, jax.Array]]:
        h_BTD, state = self.attention(self.attention_norm(x_BTD), inputs, state)
        x_BTD = x_BTD + h_BTD
        h_BTD = self.mlp_norm(x_BTD)
        if isinstance(self.mlp, MoE):
            h_BTD, noted = self.mlp(h_BTD, inputs.context.real())
        else:
            h_BTD, noted = self.mlp(h_BTD), {}
        return x_BTD + h_BTD, state, noted
