"""NF4 storage with double quantisation (QLoRA: Dettmers et al. 2023, arXiv:2305.14314).

A weight [out, in] is cut into blocks of 64 along its rows; each value becomes one of 16 levels
times its block's largest magnitude. Those magnitudes, less their mean, are stored in 8 bits by
blocks of 256. The numbers are those of bitsandbytes; 4.13 bits a weight.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.errors import UserError
from jaxtrain.layers.linear import Place
from jaxtrain.parallel.rules import gathered, mesh_axes

LEVELS = np.array(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ],
    np.float32,
)
THRESHOLDS = np.array(
    [
        *(-0.8480964004993439, -0.6106329262256622, -0.4599952697753906, -0.33967943489551544),
        *(-0.23460740596055984, -0.13791173323988914, -0.045525018125772476),
        *(0.03979014977812767, 0.1202552504837513, 0.2035212516784668, 0.2920137718319893),
        *(0.3893125355243683, 0.5016634166240692, 0.6427869200706482, 0.8614784181118011),
    ],
    np.float32,
)
BLOCK, OUTER = 64, 256


def dynamic_map() -> np.ndarray:
    """float32 [256]: bitsandbytes' signed dynamic 8-bit levels, sorted."""
    positive = []
    for i in range(7):
        bounds = np.linspace(0.1, 1, 2**i + 1, dtype=np.float32)
        positive += list((bounds[:-1] + bounds[1:]) / 2 * 10.0 ** (i - 6))
    return np.sort(np.array([*positive, *(-p for p in positive), 0.0, 1.0], np.float32))


DYNAMIC = dynamic_map()
MIDDLES = (DYNAMIC[:-1] + DYNAMIC[1:]) / 2


class NF4(nnx.Module):
    """A Linear's kernel [..., in, out] in 4 bits; shapes or arrays as `nf4_shapes` names them."""

    def __init__(self, parts: dict, axes: tuple[str | None, ...]):
        *lead, num_in, num_out = axes
        self.nibbles = nnx.Param(parts["nibbles"], axes=(*lead, num_out, num_in))
        self.absmax = nnx.Param(parts["absmax"], axes=(*lead, num_out, num_in))
        self.scales = nnx.Param(parts["scales"], axes=(*lead, None))
        self.offset = nnx.Param(parts["offset"], axes=tuple(lead))

    def multiply(self, x: jax.Array) -> jax.Array:
        """x [..., in] @ kernel in x's dtype. Backward unpacks the kernel again, so that it is never
        kept."""

        def product(x: jax.Array, parts: dict[str, jax.Array]) -> jax.Array:
            return x @ dequantise_nf4(parts, x.dtype)

        return jax.checkpoint(product)(x, {name: gathered(getattr(self, name)) for name in PARTS})

    def packed(self) -> "PackedNF4":
        """The kernels [E, in, out] of experts, for the grouped matmul."""
        parts = {name: getattr(self, name)[...] for name in PARTS}
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty or not mesh_axes("mlp", mesh):
            return PackedNF4(**parts)
        _, num_out, blocks = parts["absmax"].shape
        group = jnp.arange(num_out * blocks, dtype=jnp.int32).reshape(num_out, blocks) // OUTER
        return PackedNF4(**parts, group=group)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedNF4:
    """A `Packed` of experts; the parts are those of `nf4_shapes`."""

    nibbles: Any
    absmax: Any
    scales: Any
    offset: Any
    group: Any = None
    """int32 [out, blocks], alike for all experts: the scale of each of `absmax`, where a device has
    a piece of each matrix; None: they are whole."""

    @property
    def shape(self) -> tuple[int, ...]:
        experts, num_out, half = self.nibbles.shape
        return experts, 2 * half, num_out

    def unpack(self, dtype: jnp.dtype) -> jax.Array:
        parts = {name: getattr(self, name) for name in PARTS}
        return dequantise_nf4(parts, dtype, self.group)

    def specs(self, names: Sequence[str | None], place: Place) -> "PackedNF4":
        experts, num_in, num_out = names
        nibbles = place((experts, num_out, num_in), self.nibbles.shape)
        absmax = place((experts, num_out, num_in), self.absmax.shape)
        if nibbles != absmax:
            raise UserError(
                f'adapter.quantize "nf4": inputs of {self.shape[1]} in blocks of {BLOCK} cannot be'
                " cut over parallel.tensor; choose parallel.expert or parallel.fsdp instead"
            )
        return PackedNF4(
            nibbles,
            absmax,
            place((experts, None), self.scales.shape),
            place((experts,), self.offset.shape),
            self.group if self.group is None else place((num_out, num_in), self.group.shape),
        )


PARTS = ("nibbles", "absmax", "scales", "offset")


def nf4_shapes(shape: tuple[int, ...]) -> dict[str, jax.ShapeDtypeStruct]:
    """What a kernel [..., in, out] is stored as; `in` must be a multiple of 64."""
    *lead, num_in, num_out = shape
    blocks = num_out * (num_in // BLOCK)
    return {
        "nibbles": jax.ShapeDtypeStruct((*lead, num_out, num_in // 2), jnp.uint8),
        "absmax": jax.ShapeDtypeStruct((*lead, num_out, num_in // BLOCK), jnp.uint8),
        "scales": jax.ShapeDtypeStruct((*lead, -(-blocks // OUTER)), jnp.float32),
        "offset": jax.ShapeDtypeStruct(tuple(lead), jnp.float32),
    }


def quantise_nf4(kernel: jax.Array) -> dict[str, jax.Array]:
    """One kernel [in, out] in parts. A value on a threshold goes down; a block of zeros stays."""
    num_in, num_out = kernel.shape
    blocks = kernel.T.astype(jnp.float32).reshape(num_out, num_in // BLOCK, BLOCK)
    absmax = jnp.abs(blocks).max(-1)
    unit = blocks / jnp.where(absmax > 0, absmax, 1.0)[..., None]
    # Codes are the number of thresholds strictly below.
    codes = jnp.searchsorted(jnp.asarray(THRESHOLDS), unit, method="compare_all").astype(jnp.uint8)
    codes = codes.reshape(num_out, num_in // 2, 2)
    offset = absmax.mean()
    centred = (absmax - offset).reshape(-1)
    outer = jnp.pad(centred, (0, -centred.size % OUTER)).reshape(-1, OUTER)
    scales = jnp.abs(outer).max(-1)
    unit = outer / jnp.where(scales > 0, scales, 1.0)[:, None]
    nearest = jnp.searchsorted(jnp.asarray(MIDDLES), unit).astype(jnp.uint8)
    return {
        "nibbles": codes[..., 0] << 4 | codes[..., 1],  # the first value in the high half
        "absmax": nearest.reshape(-1)[: centred.size].reshape(absmax.shape),
        "scales": scales,
        "offset": offset,
    }


def dequantise_nf4(
    parts: dict[str, jax.Array], dtype: jnp.dtype, group: jax.Array | None = None
) -> jax.Array:
    """The kernel [..., in, out] of its parts, summed in float32, cast to `dtype`.

    group: int32 [out, blocks], which of the scales belongs to each of absmax; None: OUTER of them
    after each other have one.
    """
    nibbles, codes = parts["nibbles"], parts["absmax"]
    *lead, num_out, half = nibbles.shape
    if group is None:
        scales = jnp.repeat(parts["scales"], OUTER, axis=-1)
        scales = scales[..., : num_out * codes.shape[-1]].reshape(codes.shape)
    else:
        scales = parts["scales"][..., group]
    absmax = jnp.asarray(DYNAMIC)[codes] * scales + parts["offset"][..., None, None]
    index = jnp.stack([nibbles >> 4, nibbles & 15], axis=-1)
    levels = jnp.asarray(LEVELS)[index].reshape(*lead, num_out, -1, BLOCK)
    values = (levels * absmax[..., None]).reshape(*lead, num_out, 2 * half)
    return values.astype(dtype).swapaxes(-1, -2)
