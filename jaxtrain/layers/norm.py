"""RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467) and LayerNorm (Ba et al. 2016,
arXiv:1607.06450), in the variants of the families."""

import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtrain_kernels.rotate_heads.reference import to_unit
from jaxtrain_kernels.rotate_heads.xla import normalize

from jaxtrain.layers.linear import Dtype


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + eps) * scale over the last dim; statistics in at least float32.

    The normalized value is rounded to x's dtype before the scale is applied, as transformers does.
    """

    parameters: ClassVar[tuple[str, ...]] = ("scale",)
    """Names of the parameters."""

    def __init__(self, num_features: int, *, eps: float, param_dtype: Dtype = jnp.float32):
        self.scale = nnx.Param(jnp.ones((num_features,), param_dtype), axes=("norm",))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        return normalize(x, self.scale[...], self.eps)


class ZeroCenteredRMSNorm(RMSNorm):
    """x / sqrt(mean(x^2) + eps) * (1 + scale), rounded to x's dtype at the end (Qwen3-Next)."""

    def __init__(self, num_features: int, *, eps: float, param_dtype: Dtype = jnp.float32):
        self.scale = nnx.Param(jnp.zeros((num_features,), param_dtype), axes=("norm",))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        return normalize_zero_centered(x, self.scale[...], self.eps)


class PreciseRMSNorm(RMSNorm):
    """RMSNorm whose scale is applied before the value is rounded to x's dtype."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return normalize_precisely(x, self.scale[...], self.eps)


class UnitRMSNorm(RMSNorm):
    """x / sqrt(mean(x^2) + eps) alone: no weight (values in Gemma 4)."""

    parameters = ()

    def __init__(self, num_features: int, *, eps: float, param_dtype: Dtype = jnp.float32):
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        return normalize_alone(x, self.eps)


class LayerNorm(RMSNorm):
    """(x - mean(x)) / sqrt(var(x) + eps) * scale + bias, rounded to x's dtype at the end."""

    parameters = ("scale", "bias")
    offset: ClassVar[float] = 0.0
    """Added to the scale."""

    def __init__(self, num_features: int, *, eps: float, param_dtype: Dtype = jnp.float32):
        self.eps = eps
        values = {"scale": 1 - self.offset, "bias": 0.0}
        for name in self.parameters:
            array = jnp.full((num_features,), values[name], param_dtype)
            setattr(self, name, nnx.Param(array, axes=("norm",)))

    def __call__(self, x: jax.Array) -> jax.Array:
        arrays = {name: getattr(self, name)[...] for name in self.parameters}
        return normalize_centered(x, arrays.get("scale"), arrays.get("bias"), self.eps, self.offset)


class ZeroCenteredLayerNorm(LayerNorm):
    """LayerNorm with the scale 1 + scale (Nemotron)."""

    offset = 1.0


class ScaledLayerNorm(LayerNorm):
    """LayerNorm without a bias (Cohere)."""

    parameters = ("scale",)


class UnitLayerNorm(LayerNorm):
    """LayerNorm without weights (OLMo)."""

    parameters = ()


class GroupedRMSNorm(RMSNorm):
    """RMSNorm(x * silu(gate)) over each of `num_groups` equal parts of the last dim (Mamba-2: Dao
    and Gu 2024, arXiv:2405.21060), or RMSNorm(x) * silu(gate); rounded once, at the end."""

    def __init__(
        self,
        num_features: int,
        num_groups: int,
        *,
        gate_first: bool = True,
        eps: float,
        param_dtype: Dtype = jnp.float32,
    ):
        super().__init__(num_features, eps=eps, param_dtype=param_dtype)
        self.scale.set_metadata(axes=("heads",))
        self.num_groups, self.gate_first = num_groups, gate_first

    def __call__(self, x: jax.Array, gate: jax.Array) -> jax.Array:
        how = self.eps, self.num_groups, self.gate_first
        return normalize_groups(x, gate, self.scale[...], *how)


class GatedRMSNorm(RMSNorm):
    """RMSNorm(x) * silu(gate); the scale in at least float32, whatever the other weights are."""

    def __init__(self, num_features: int, *, eps: float, param_dtype: Dtype = jnp.float32):
        wide = jnp.promote_types(param_dtype, jnp.float32)
        super().__init__(num_features, eps=eps, param_dtype=wide)

    def __call__(self, x: jax.Array, gate: jax.Array) -> jax.Array:
        return normalize_gated(x, gate, self.scale[...], self.eps)


# Each formula is rematerialized on its own, as `normalize`, that of RMSNorm.
@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=1)
def normalize_alone(x: jax.Array, eps: float) -> jax.Array:
    """The formula of UnitRMSNorm, on arrays."""
    return to_unit(x, eps).astype(x.dtype)


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=2)
def normalize_zero_centered(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """The formula of ZeroCenteredRMSNorm, on arrays."""
    unit = to_unit(x, eps)
    return (unit * (1 + scale.astype(unit.dtype))).astype(x.dtype)


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=2)
def normalize_precisely(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """The formula of PreciseRMSNorm, on arrays."""
    unit = to_unit(x, eps)
    return (unit * scale.astype(unit.dtype)).astype(x.dtype)


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=(3, 4))
def normalize_centered(
    x: jax.Array, scale: jax.Array | None, bias: jax.Array | None, eps: float, offset: float
) -> jax.Array:
    """The formula of LayerNorm, on arrays; None: no scale, no bias."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    y = to_unit(wide - wide.mean(axis=-1, keepdims=True), eps)
    if scale is not None:
        y = y * (scale.astype(y.dtype) + offset)
    return (y if bias is None else y + bias.astype(y.dtype)).astype(x.dtype)


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=(3, 4, 5))
def normalize_groups(
    x: jax.Array, gate: jax.Array, scale: jax.Array, eps: float, num_groups: int, gate_first: bool
) -> jax.Array:
    """The formula of GroupedRMSNorm, on arrays."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    gate = jax.nn.silu(gate.astype(wide))
    y = x.astype(wide) * gate if gate_first else x.astype(wide)
    y = to_unit(y.reshape(*x.shape[:-1], num_groups, -1), eps).reshape(x.shape)
    y = y * scale.astype(wide)
    return (y if gate_first else y * gate).astype(x.dtype)


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=3)
def normalize_gated(x: jax.Array, gate: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """The formula of GatedRMSNorm, on arrays: rounded to x's dtype before the scale and at the
    end, as transformers does."""
    unit = to_unit(x, eps)
    scaled = unit.astype(x.dtype).astype(unit.dtype) * scale.astype(unit.dtype)
    return (scaled * jax.nn.silu(gate.astype(unit.dtype))).astype(x.dtype)
