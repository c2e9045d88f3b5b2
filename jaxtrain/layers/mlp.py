"""MLP: down(act(up(x))); GatedMLP: down(act(gate(x)) * up(x)) (Shazeer 2020, arXiv:2002.05202)."""

import functools
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.distributed.sharding import constrain
from jaxtrain.layers.fused_linear import fuse_kernels, multiply_fused
from jaxtrain.layers.linear import LayerInit, Linear

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_pytorch_tanh": functools.partial(jax.nn.gelu, approximate=True),
    **dict.fromkeys(("gelu_new", "gelu_fast"), functools.partial(jax.nn.gelu, approximate=True)),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),  # So et al. 2021, arXiv:2109.08668
}


class MLP(nnx.Module):
    """[..., D] -> [..., D] through F; `activation` is a key of ACTIVATIONS."""

    preset = "mlp"
    is_gated: ClassVar[bool] = False

    def __init__(
        self,
        num_features: int,
        num_hidden: int,
        *,
        activation: str = "silu",
        use_bias: bool = False,
        linear: type[Linear] = Linear,
        init: LayerInit,
    ):
        linear = functools.partial(linear, use_bias=use_bias, init=init)
        if self.is_gated:
            self.gate = linear(num_features, num_hidden, axes=("embed", "mlp"))
        self.up = linear(num_features, num_hidden, axes=("embed", "mlp"))
        self.down = linear(num_hidden, num_features, axes=("mlp", "embed"))
        self.activation = activation

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        x_BTD = constrain(x_BTD, "rows", "length", "features")
        h_BTF = self._hidden(x_BTD)
        y_BTD = self.down(constrain(h_BTF, "rows", "length", "act_mlp"))
        return constrain(y_BTD, "rows", "sequence", "features")

    def _hidden(self, x_BTD: jax.Array) -> jax.Array:
        """[..., F], behind the activation."""
        return activated(self.up(x_BTD), self.activation)


class GatedMLP(MLP):
    """An MLP with a gate, which the activation applies to: down(act(gate(x)) * up(x))."""

    is_gated = True

    def fuse_kernels(self) -> None:
        """Fuse the kernels that read the input."""
        fuse_kernels(self.gate, self.up)

    def _hidden(self, x_BTD: jax.Array) -> jax.Array:
        return gated(*multiply_fused(x_BTD, self.gate, self.up), self.activation)


class ScaledMLP(GatedMLP):
    """A GatedMLP with factors before its activation and behind it all (Falcon-H1):
    down_scale * down(act(gate_scale * gate(x)) * up(x))."""

    def __init__(self, *sizes: int, gate_scale: float, down_scale: float, **options):
        super().__init__(*sizes, **options)
        self.gate_scale, self.down_scale = gate_scale, down_scale

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        return super().__call__(x_BTD) * jnp.asarray(self.down_scale, x_BTD.dtype)

    def _hidden(self, x_BTD: jax.Array) -> jax.Array:
        gate, up = multiply_fused(x_BTD, self.gate, self.up)
        return gated(gate * jnp.asarray(self.gate_scale, gate.dtype), up, self.activation)


# As in norm.py: the backward keeps the two inputs and nothing in between.
@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=2)
def gated(gate: jax.Array, up: jax.Array, activation: str) -> jax.Array:
    """act(gate) * up."""
    return ACTIVATIONS[activation](gate) * up


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=1)
def activated(up: jax.Array, activation: str) -> jax.Array:
    """act(up)."""
    return ACTIVATIONS[activation](up)
