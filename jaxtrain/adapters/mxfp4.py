"""MXFP4 storage of experts' matrices (OCP Microscaling 1.0), the one that gpt-oss is published in.

Blocks of 32 values along the inputs share a power of two; a value is one of 0, 0.5, 1, 1.5, 2, 3,
4, 6 times that, or its negative: 4.25 bits a weight. What was read from such a folder is stored
again without any error; other weights are rounded to the nearest.

Here, unlike in folders, the inputs come before the outputs, as in kernels: to turn a layer around
when it is unpacked is something that XLA does to all layers before the loop over them, and all
packed weights are in memory twice.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.errors import UserError
from jaxtrain.huggingface import packed
from jaxtrain.huggingface.ops import Interleaved, StackedOps, TensorOp, TensorRef
from jaxtrain.huggingface.packed import PackedFolder
from jaxtrain.huggingface.safetensors import SafetensorsFolder
from jaxtrain.layers.linear import SpecOf
from jaxtrain.models.parameters import Shapes

BLOCK = 32
DOWN, UP = (0.25, 1.25, 2.5, 5.0), (0.75, 1.75, 3.5)
"""Middles between neighbors that round to the lower and to the upper one: to even codes."""
BIAS, MANTISSA = 127, 23  # of float32


class MXFP4Kernel(nnx.Module):
    """A kernel [..., in, out] of experts; shapes or arrays as `mxfp4_shapes` names them."""

    def __init__(self, parts: dict, axes: tuple[str | None, ...]):
        self.blocks = nnx.Param(parts["blocks"], axes=axes)
        self.scales = nnx.Param(parts["scales"], axes=axes)

    def packed(self) -> "PackedMXFP4":
        """The kernels [E, in, out], for the grouped matmul."""
        return PackedMXFP4(self.blocks[...], self.scales[...])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedMXFP4:
    """A `layers.linear.Packed`; the parts are those of `mxfp4_shapes`."""

    blocks: Any
    scales: Any

    @property
    def shape(self) -> tuple[int, ...]:
        experts, half, num_out = self.blocks.shape
        return experts, 2 * half, num_out

    def unpack(self, dtype: jnp.dtype) -> jax.Array:
        return dequantize_mxfp4({"blocks": self.blocks, "scales": self.scales}, dtype)

    def specs(self, names: Sequence[str | None], spec_of: SpecOf) -> "PackedMXFP4":
        specs = [spec_of(names, x.shape) for x in (self.blocks, self.scales)]
        if specs[0] != specs[1]:
            raise UserError(
                f'adapter.quantize "mxfp4": inputs of {self.shape[1]} in blocks of {BLOCK} cannot'
                " be cut over parallel.tensor; choose parallel.expert or parallel.fsdp instead"
            )
        return PackedMXFP4(*specs)


def mxfp4_shapes(shape: tuple[int, ...]) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of the parts that store a kernel [..., in, out]; `in` must be a multiple of
    32."""
    *lead, num_in, num_out = shape
    return {
        "blocks": jax.ShapeDtypeStruct((*lead, num_in // 2, num_out), jnp.uint8),
        "scales": jax.ShapeDtypeStruct((*lead, num_in // BLOCK, num_out), jnp.uint8),
    }


def read_mxfp4(
    files: SafetensorsFolder, op: TensorOp, shapes: Shapes
) -> dict[str, jax.Array] | None:
    """Read the parts of stacked kernels from a folder that stores them in MXFP4, with the shapes
    and shardings of `shapes`; None if it stores them otherwise."""
    if not isinstance(op, StackedOps) or not isinstance(files, PackedFolder):
        return None
    layers = []
    for layer in op.ops:
        if not isinstance(layer, TensorRef | Interleaved):
            return None
        stored = files.packed.get(layer.name)
        if not isinstance(stored, packed.MXFP4Tensor):
            return None
        rows = (
            slice(layer.start, None, layer.step) if isinstance(layer, Interleaved) else slice(None)
        )
        views = [view[:, rows] for view in stored.view()]
        if (views[1] == 255).any():
            raise UserError(
                f"{files.tensors[layer.name].file}: {stored.parts[1]} holds scales of NaN: the file"
                " is damaged; download it again"
            )
        layers.append(dict(zip(("blocks", "scales"), views, strict=True)))

    def read(name: str, index: Any) -> np.ndarray:
        experts, inputs, outputs = index[1:]
        matrices = [layer[name][experts, outputs, inputs] for layer in layers[index[0]]]
        return np.stack(matrices).swapaxes(-1, -2)

    return {
        name: jax.make_array_from_callback(
            shape.shape, shape.sharding, functools.partial(read, name)
        )
        for name, shape in shapes.items()
    }


def quantize_mxfp4(kernel: jax.Array) -> dict[str, jax.Array]:
    """Quantize a kernel [in, out] to its parts. A block's power of two is that of its largest
    magnitude, which then lies from 4 to 8, and counts as 6 above that."""
    num_in, num_out = kernel.shape
    blocks = kernel.astype(jnp.float32).reshape(num_in // BLOCK, BLOCK, num_out)
    largest = jax.lax.bitcast_convert_type(jnp.abs(blocks).max(1), jnp.int32) >> MANTISSA
    scales = jnp.clip(largest - 2, 1, 254)
    unit = jnp.abs(blocks) / _power(scales)[:, None]
    codes = jnp.signbit(blocks).astype(jnp.uint8) << 3
    for middle in DOWN:
        codes += (unit > middle).astype(jnp.uint8)
    for middle in UP:
        codes += (unit >= middle).astype(jnp.uint8)
    pairs = codes.reshape(num_in // 2, 2, num_out)
    return {
        "blocks": pairs[:, 1] << 4 | pairs[:, 0],  # the first value in the low half
        "scales": scales.astype(jnp.uint8),
    }


def dequantize_mxfp4(parts: dict[str, jax.Array], dtype: jnp.dtype) -> jax.Array:
    """Return the kernel [..., in, out] of its parts in `dtype`, exact in bfloat16 and wider."""
    blocks, scales = parts["blocks"], parts["scales"]
    *lead, half, num_out = blocks.shape
    # Without a concatenation, whose fusion an H200 takes longer for than for the arithmetic.
    halves = jnp.array([[0], [4]], jnp.uint8)  # the first value in the low half
    codes = (blocks[..., None, :] >> halves).astype(jnp.int32)
    size = codes & 7
    # From 1 on two bits of exponent and one of mantissa, as in float32; below there are 0 and 0.5.
    half_one = (BIAS - 1) << MANTISSA
    bits = jnp.where(size < 2, size * half_one, (size << (MANTISSA - 1)) + half_one)
    values = jax.lax.bitcast_convert_type(bits | (codes & 8) << 28, jnp.float32)
    values = values.reshape(*lead, -1, BLOCK, num_out)
    values = values * _power(scales.astype(jnp.int32))[..., None, :]
    return values.astype(dtype).reshape(*lead, 2 * half, num_out)


def _power(scales: jax.Array) -> jax.Array:
    """2^(scale - 127) of int32 scales; 0, as which the smallest scale counts."""
    return jax.lax.bitcast_convert_type(scales << MANTISSA, jnp.float32)
