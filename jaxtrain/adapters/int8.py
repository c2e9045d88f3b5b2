"""Int8 storage, weights only: a scale for every output, values rounded to the nearest of 255."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.distributed.sharding import gathered
from jaxtrain.layers.linear import SpecOf


class Int8(nnx.Module):
    """A Linear's kernel [..., in, out] in 8 bits; shapes or arrays as `int8_shapes` names them."""

    def __init__(self, parts: dict, axes: tuple[str | None, ...]):
        self.codes = nnx.Param(parts["codes"], axes=axes)
        self.scales = nnx.Param(parts["scales"], axes=(*axes[:-2], axes[-1]))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    @property
    def axes(self) -> tuple[str | None, ...]:
        """Logical axes of the kernel's dims."""
        return self.codes.get_metadata()["axes"]

    def concatenate(self, *kernels: "Int8") -> "Int8":
        """Return a kernel with the columns of this one followed by those of others."""
        parts = {
            name: jnp.concatenate(
                [getattr(kernel, name)[...] for kernel in (self, *kernels)], axis=-1
            )
            for name in ("codes", "scales")
        }
        return Int8(parts, (*self.axes[:-1], None))

    def multiply(self, x: jax.Array) -> jax.Array:
        """x [..., in] @ kernel in x's dtype; backward unpacks the codes again."""

        def product(x: jax.Array, codes: jax.Array, scales: jax.Array) -> jax.Array:
            return ((x @ codes.astype(x.dtype)) * scales).astype(x.dtype)

        return jax.checkpoint(product)(x, gathered(self.codes), self.scales[...])

    def packed(self) -> "PackedInt8":
        """The kernels [E, in, out] of experts, for the grouped matmul."""
        return PackedInt8(self.codes[...], self.scales[...])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedInt8:
    """A `Packed` of experts; the parts are those of `int8_shapes`."""

    codes: Any
    scales: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    def unpack(self, dtype: jnp.dtype) -> jax.Array:
        return dequantize_int8({"codes": self.codes, "scales": self.scales}, dtype)

    def specs(self, names: Sequence[str | None], spec_of: SpecOf) -> "PackedInt8":
        return PackedInt8(
            spec_of(names, self.codes.shape), spec_of((names[0], names[2]), self.scales.shape)
        )


def int8_shapes(shape: tuple[int, ...]) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of the parts that store a kernel [..., in, out]."""
    return {
        "codes": jax.ShapeDtypeStruct(shape, jnp.int8),
        "scales": jax.ShapeDtypeStruct((*shape[:-2], shape[-1]), jnp.float32),
    }


def quantize_int8(kernel: jax.Array) -> dict[str, jax.Array]:
    """Quantize a kernel [in, out] to its parts; the largest magnitude of a column becomes 127."""
    wide = kernel.astype(jnp.float32)
    scales = jnp.abs(wide).max(0) / 127
    codes = jnp.round(wide / jnp.where(scales > 0, scales, 1.0))
    return {"codes": codes.astype(jnp.int8), "scales": scales}


def dequantize_int8(parts: dict[str, jax.Array], dtype: jnp.dtype) -> jax.Array:
    """Return the kernel [..., in, out] of its parts, cast to `dtype`."""
    return (parts["codes"].astype(jnp.float32) * parts["scales"][..., None, :]).astype(dtype)
