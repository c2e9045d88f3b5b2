"""ShortConv: a gated convolution over few tokens (LFM2: Liquid AI 2025, arXiv:2511.23404); its
state is what the next tokens still reach.

    u = g_in * x;  y = W_out (g_out * (convolution of `taps` along the branch (u)))

g_in, g_out and x are matrices' products with the layer's input.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtrain_kernels import causal_conv
from typing_extensions import override

from jaxtrain.distributed.sharding import constrain
from jaxtrain.errors import UserError
from jaxtrain.layers.fused_linear import fuse_kernels, multiply_fused
from jaxtrain.layers.linear import Dtype, LayerInit, Linear
from jaxtrain.layers.mixer import Decoding, LayerInputs, LayerSpec, Mixer
from jaxtrain.layers.recurrent import move_tail


class TrialConvState(NamedTuple):
    """A state, and inputs of new tokens of which an unknown number will be accepted."""

    tail: jax.Array
    u_BTF: jax.Array


class ShortConv(Mixer):
    """[B, T, D] -> [B, T, D]; the state [B, taps - 1, D] is what went into the convolution last."""

    follows_trees = True
    trials = "own"
    preset = "attention"
    state_axes = ("rows", None, "act_heads")

    def __init__(self, num_features: int, *, taps: int, init: LayerInit):
        linear = functools.partial(Linear, num_features, num_features, init=init)
        self.gate_in = linear(axes=("embed", "heads"))
        self.gate_out = linear(axes=("embed", "heads"))
        self.x = linear(axes=("embed", "heads"))
        conv_F1W = init.normal((num_features, 1, taps))
        self.conv = nnx.Param(conv_F1W, axes=("heads", None, None))
        self.out = linear(axes=("heads", "embed"))
        self.num_features, self.taps = num_features, taps

    @override
    def init_state(self, spec: LayerSpec, rows: int, slots: int, dtype: Dtype) -> jax.Array:
        # Its size does not depend on the number of slots.
        return jnp.zeros((rows, self.taps - 1, self.num_features), dtype)

    @override
    def mixing_flops(self, spec: LayerSpec, spans: np.ndarray) -> float:
        return 2.0 * self.taps * self.num_features * len(spans)

    @override
    def commit_state(self, spec: LayerSpec, tried: TrialConvState, decoding: Decoding) -> jax.Array:
        return _move(tried.tail, tried.u_BTF, decoding)

    def _input_linears(self) -> tuple[Linear, Linear, Linear]:
        return self.gate_in, self.gate_out, self.x

    def fuse_kernels(self) -> None:
        """Fuse the kernels that read the input."""
        fuse_kernels(*self._input_linears())

    def __call__(
        self, x_BTD: jax.Array, inputs: LayerInputs, state: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array | TrialConvState | None]:
        context = inputs.context
        if state is None and context.since is not None:
            raise UserError(
                "Convolutions read each token after the one before it; tokens that see later ones"
                " (prefix attention) are not supported for this model"
            )
        x_BTD = constrain(x_BTD, "rows", "length", "features")
        gate_in, gate_out, x = multiply_fused(x_BTD, *self._input_linears())
        u_BTF = constrain(gate_in * x, "rows", None, "row_heads")  # whole rows of some features
        conv_FW = self.conv[...][:, 0]
        conv_BTF = causal_conv(u_BTF, conv_FW, context.prev if state is None else None, state)
        y_BTD = self.out(gate_out * constrain(conv_BTF, "rows", "length", "act_heads"))
        y_BTD = constrain(y_BTD, "rows", "sequence", "features")
        if state is None:
            return y_BTD, None
        if inputs.trial:
            return y_BTD, TrialConvState(state, u_BTF)
        return y_BTD, _move(state, u_BTF, inputs.decoding)


def _move(tail_BWF: jax.Array, u_BTF: jax.Array, decoding: Decoding) -> jax.Array:
    """The tail behind the new tokens that count."""
    count_B = decoding.end - decoding.start
    return move_tail(tail_BWF[:, :, None], u_BTF[:, :, None], count_B)[:, :, 0]
