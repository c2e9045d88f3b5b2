"""Block: a mixer and an MLP, each between norms, as in most decoders.
SingleBlock: x + layer(norm(x)), one layer of either kind.

The mixer of a Block is called `attention`, even if it is linear attention or Mamba."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.layers.embed import take_features
from jaxtrain.layers.mixer import ImageContext, LayerInputs, Mixer, State, Tokenwise
from jaxtrain.layers.mlp import MLP
from jaxtrain.layers.moe import MoE
from jaxtrain.layers.norm import RMSNorm
from jaxtrain.layers.parallel_mlp import ParallelMLP
from jaxtrain.layers.per_layer import PerLayerGate


class Block(nnx.Module):
    """[B, T, D] -> [B, T, D]: x + attention_out_norm(attention(attention_norm(x))), then likewise
    for the MLP: dense, a mixture of experts that returns its balance, or both.

    A norm that is None is omitted: most families have the two before, OLMo 2 (arXiv:2501.00656) the
    two after, Gemma all four. parallel: the MLP reads x as the attention does, through the
    attention's norm where it has none of its own (Cohere). residual_scale: factor on either branch
    before it is added.
    per_layer: adds the layer's slice of the stack's extra inputs. scalar: multiply the result by
    `layer_scalar` [1], a number that is loaded and saved, and has no gradient.
    """

    def __init__(
        self,
        attention: Mixer,
        mlp: MLP | MoE | ParallelMLP,
        *,
        attention_norm: RMSNorm | None = None,
        attention_out_norm: RMSNorm | None = None,
        mlp_norm: RMSNorm | None = None,
        mlp_out_norm: RMSNorm | None = None,
        parallel: bool = False,
        residual_scale: float = 1.0,
        per_layer: PerLayerGate | None = None,
        scalar: bool = False,
    ):
        self.attention_norm = attention_norm
        self.attention = attention
        self.attention_out_norm = attention_out_norm
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.mlp_out_norm = mlp_out_norm
        self.parallel = parallel
        self.residual_scale = residual_scale
        self.per_layer = per_layer
        # float32 whatever the other weights are: a rounded factor would scale the whole layer.
        ones = jnp.ones((1,), jnp.float32)
        self.layer_scalar = nnx.Param(ones, axes=("norm",)) if scalar else None

    @property
    def mixer(self) -> Mixer:
        """The mixer that the block's state belongs to."""
        return self.attention

    def __call__(
        self, x_BTD: jax.Array, inputs: LayerInputs, state: State = None
    ) -> tuple[jax.Array, State, dict[str, jax.Array]]:
        read_BTD = self.read(x_BTD)
        h_BTD, state = self.attention(read_BTD, inputs, state)
        x_BTD, noted = self.write(x_BTD, read_BTD, h_BTD, inputs, feed_forward)
        return x_BTD, state, noted

    def read(self, x_BTD: jax.Array) -> jax.Array:
        """Return the mixer's input."""
        return _norm(self.attention_norm, x_BTD)

    def write(
        self,
        x_BTD: jax.Array,
        read_BTD: jax.Array | None,
        h_BTD: jax.Array,
        inputs: LayerInputs,
        feed: "FeedForward",
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return (the block's output, notes) of its input x, what the mixer read of it (needed if
        `parallel`) and the mixer's output h; `feed` runs the MLP."""
        before_BTD = x_BTD
        x_BTD = x_BTD + self._scaled(_norm(self.attention_out_norm, h_BTD))
        if not self.parallel:
            read_BTD = _norm(self.mlp_norm, x_BTD)
        elif self.mlp_norm is not None:
            read_BTD = self.mlp_norm(before_BTD)
        h_BTD, noted = feed(self.mlp, read_BTD, inputs)
        x_BTD = x_BTD + self._scaled(_norm(self.mlp_out_norm, h_BTD))
        return self._finish(x_BTD, inputs), noted

    def _finish(self, x_BTD: jax.Array, inputs: LayerInputs) -> jax.Array:
        """Add per-layer inputs and features of images, and apply `layer_scalar`."""
        if self.per_layer is not None:
            x_BTD = x_BTD + self.per_layer(x_BTD, inputs.extra)
        if inputs.spec.adds is not None and isinstance(inputs.side_context, ImageContext):
            slot_BT, deep = inputs.side_context
            x_BTD = x_BTD + take_features(slot_BT, deep[inputs.spec.adds]).astype(x_BTD.dtype)
        if self.layer_scalar is None:
            return x_BTD
        scalar = jax.lax.stop_gradient(self.layer_scalar[...])
        wide = jnp.promote_types(x_BTD.dtype, scalar.dtype)
        return (x_BTD.astype(wide) * scalar.astype(wide)).astype(x_BTD.dtype)

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
        """The mixer that the block's state belongs to."""
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


FeedForward = Callable[[Any, Any, LayerInputs], tuple[jax.Array, dict[str, jax.Array]]]
"""(MLP, its input [B, T, D], the block's inputs) -> (output, notes)."""


def feed_forward(
    layer: MLP | MoE | ParallelMLP, x_BTD: jax.Array, inputs: LayerInputs
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return (the layer's output, its notes)."""
    if isinstance(layer, MLP):
        return layer(x_BTD), {}
    return layer(x_BTD, inputs.context, inputs.experts)


def _norm(norm: RMSNorm | None, x: jax.Array) -> jax.Array:
    return x if norm is None else norm(x)
