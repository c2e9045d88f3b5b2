"""NF4 storage with double quantization (QLoRA: Dettmers et al. 2023, arXiv:2305.14314).

A weight [out, in] is cut into blocks of 64 along its rows; each value becomes one of 16 levels
times its block's largest magnitude. Those magnitudes, less their mean, are stored in 8 bits by
blocks of 256. The numbers are those of bitsandbytes; 4.13 bits a weight.

Both kinds of blocks, and the mean, are those of one matrix, or, where it has a `TensorPart`, of a
whole tensor of several, as bitsandbytes has them: jaxtrain.adapters.fused.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.distributed.sharding import gathered, mesh_axes
from jaxtrain.errors import UserError
from jaxtrain.layers.linear import SpecOf

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
        bounds = _linspace(2**i + 1)
        positive += list((bounds[:-1] + bounds[1:]) / 2 * np.float32(10.0 ** (i - 6)))
    return np.sort(np.array([*positive, *(-p for p in positive), 0.0, 1.0], np.float32))


def _linspace(num: int) -> np.ndarray:
    """float32 [num] from 0.1 to 1, to the last bit as torch.linspace rounds them: from the nearer
    end, product and sum at once."""
    low, high, index = np.float32(0.1), np.float32(1), np.arange(num)
    step = np.float64((high - low) / np.float32(num - 1))
    rising, falling = low + step * index, high - step * (num - 1 - index)
    return np.where(index < num // 2, rising, falling).astype(np.float32)


DYNAMIC = dynamic_map()
MIDDLES = (DYNAMIC[:-1] + DYNAMIC[1:]) / 2


@dataclasses.dataclass(frozen=True)
class TensorPart:
    """The location of a layer's kernel, `num` matrices [in, out], in a tensor that is quantized as
    one: [num, total, in], with outputs as rows."""

    tensor: str
    """That of the first layer."""
    runs: tuple[tuple[int, int], ...]
    """(start, size) of our outputs among the rows of each of the `num`."""
    total: int
    num: int = 1

    @property
    def is_whole(self) -> bool:
        """True if it is the whole tensor, in its order."""
        return self.num == 1 and self.runs == ((0, self.total),)

    @property
    def rows(self) -> np.ndarray:
        """int [out]: the row of each of our outputs."""
        return np.concatenate([np.arange(start, start + size) for start, size in self.runs])

    def firsts(self, blocks: int) -> np.ndarray:
        """Return int [num]: the first block of each matrix in the tensor; blocks: of a row."""
        return (np.arange(self.num) * self.total + self.rows.min()) * blocks

    def is_even(self, blocks: int) -> bool:
        """Return True if the scales of each matrix begin with it, as if it were quantized
        separately."""
        return len(self.runs) == 1 and not (self.firsts(blocks) % OUTER).any()

    def num_scales(self, blocks: int) -> int:
        """Return the number of scales that a matrix needs at most."""
        first, rows = self.firsts(blocks), self.rows
        last = first + (rows.max() - rows.min() + 1) * blocks - 1
        return int((last // OUTER - first // OUTER).max()) + 1

    def groups(self, blocks: int) -> jax.Array:
        """Return int32 [num, out, blocks]: the index of each block's scale among those of its
        matrix."""
        first = jnp.asarray(self.firsts(blocks) % OUTER, jnp.int32)
        least = min(start for start, _ in self.runs)
        rows = [jnp.arange(a - least, a - least + n, dtype=jnp.int32) for a, n in self.runs]
        inside = jnp.concatenate(rows)[:, None] * blocks + jnp.arange(blocks, dtype=jnp.int32)
        return (first[:, None, None] + inside) // OUTER


class NF4(nnx.Module):
    """A Linear's kernel [..., in, out] in 4 bits; shapes or arrays as `nf4_shapes` names them."""

    def __init__(self, parts: dict, axes: tuple[str | None, ...], part: TensorPart | None = None):
        *lead, num_in, num_out = axes
        self.part = part
        self.nibbles = nnx.Param(parts["nibbles"], axes=(*lead, num_out, num_in))
        self.absmax = nnx.Param(parts["absmax"], axes=(*lead, num_out, num_in))
        self.scales = nnx.Param(parts["scales"], axes=(*lead, None))
        self.offset = nnx.Param(parts["offset"], axes=tuple(lead))

    def multiply(self, x: jax.Array) -> jax.Array:
        """Compute x [..., in] @ kernel in x's dtype. The backward pass unpacks the kernel again
        instead of storing it."""

        group = self._groups()
        group = None if group is None else group[0]

        def product(x: jax.Array, parts: dict[str, jax.Array]) -> jax.Array:
            return x @ dequantize_nf4(parts, x.dtype, group)

        return jax.checkpoint(product)(x, {name: gathered(getattr(self, name)) for name in PARTS})

    def packed(self) -> "PackedNF4":
        """The kernels [E, in, out] of experts, for the grouped matmul."""
        parts = {name: getattr(self, name)[...] for name in PARTS}
        mesh = jax.sharding.get_abstract_mesh()
        group = self._groups()
        if group is None and not mesh.empty and mesh_axes("mlp", mesh):
            _, num_out, blocks = parts["absmax"].shape
            group = jnp.arange(num_out * blocks, dtype=jnp.int32).reshape(num_out, blocks) // OUTER
        return PackedNF4(**parts, group=group)

    def _groups(self) -> jax.Array | None:
        """Return `TensorPart.groups`; None if the scales begin with each matrix."""
        part, blocks = self.part, self.absmax.shape[-1]
        return None if part is None or part.is_even(blocks) else part.groups(blocks)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedNF4:
    """A `Packed` of experts; the parts are those of `nf4_shapes`."""

    nibbles: Any
    absmax: Any
    scales: Any
    offset: Any
    group: Any = None
    """int32 [out, blocks], alike for all experts, or [E, out, blocks]: the scale of each of
    `absmax`; None: OUTER of them after each other have one, and the matrices are whole."""

    @property
    def shape(self) -> tuple[int, ...]:
        experts, num_out, half = self.nibbles.shape
        return experts, 2 * half, num_out

    def unpack(self, dtype: jnp.dtype) -> jax.Array:
        parts = {name: getattr(self, name) for name in PARTS}
        return dequantize_nf4(parts, dtype, self.group)

    def specs(self, names: Sequence[str | None], spec_of: SpecOf) -> "PackedNF4":
        experts, num_in, num_out = names
        nibbles = spec_of((experts, num_out, num_in), self.nibbles.shape)
        absmax = spec_of((experts, num_out, num_in), self.absmax.shape)
        if nibbles != absmax:
            raise UserError(
                f'adapter.quantize "nf4": inputs of {self.shape[1]} in blocks of {BLOCK} cannot be'
                " cut over parallel.tensor; choose parallel.expert or parallel.fsdp instead"
            )
        return PackedNF4(
            nibbles,
            absmax,
            spec_of((experts, None), self.scales.shape),
            spec_of((experts,), self.offset.shape),
            self._group_spec((experts, num_out, num_in), spec_of),
        )

    def _group_spec(self, names: Sequence[str | None], spec_of: SpecOf) -> Any:
        return (
            self.group
            if self.group is None
            else spec_of(names[-self.group.ndim :], self.group.shape)
        )


PARTS = ("nibbles", "absmax", "scales", "offset")


def nf4_shapes(
    shape: tuple[int, ...], part: TensorPart | None = None
) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of the parts that store a kernel [..., in, out]; `in` must be a multiple of
    64."""
    *lead, num_in, num_out = shape
    blocks = num_in // BLOCK
    scales = -(-num_out * blocks // OUTER) if part is None else part.num_scales(blocks)
    return {
        "nibbles": jax.ShapeDtypeStruct((*lead, num_out, num_in // 2), jnp.uint8),
        "absmax": jax.ShapeDtypeStruct((*lead, num_out, blocks), jnp.uint8),
        "scales": jax.ShapeDtypeStruct((*lead, scales), jnp.float32),
        "offset": jax.ShapeDtypeStruct(tuple(lead), jnp.float32),
    }


def quantize_nf4(kernel: jax.Array) -> dict[str, jax.Array]:
    """Quantize a kernel [in, out] to its parts. Values on a threshold round down; zero blocks
    stay."""
    nibbles, absmax = _quantize_blocks(kernel)
    codes, scales, offset = quantize_absmax(absmax.reshape(-1))
    return {
        "nibbles": nibbles,
        "absmax": codes.reshape(absmax.shape),
        "scales": scales,
        "offset": offset,
    }


def quantize_together(
    kernels: Sequence[jax.Array], parts: Sequence[TensorPart]
) -> list[dict[str, jax.Array]]:
    """Quantize kernels [num, in, out], or [in, out], that together form one tensor: their blocks
    share scales and an offset, of which each kernel gets a copy."""
    num, total = parts[0].num, parts[0].total
    quantized = []
    for kernel in kernels:
        quantized.append(jax.lax.map(_quantize_blocks, kernel.reshape(num, *kernel.shape[-2:])))
    blocks = quantized[0][1].shape[-1]
    absmax = jnp.zeros((num, total, blocks), jnp.float32)
    for (_, block_absmax), part in zip(quantized, parts, strict=True):
        absmax = absmax.at[:, part.rows].set(block_absmax)
    codes, scales, offset = quantize_absmax(absmax.reshape(-1))
    codes, stored = codes.reshape(absmax.shape), []
    for (nibbles, _), part, kernel in zip(quantized, parts, kernels, strict=True):
        index = part.firsts(blocks)[:, None] // OUTER + np.arange(part.num_scales(blocks))
        arrays = {
            "nibbles": nibbles,
            "absmax": codes[:, part.rows],
            "scales": scales[np.minimum(index, scales.size - 1)],
            "offset": jnp.full(num, offset),
        }
        lead = kernel.shape[:-2]
        stored.append({name: x.reshape(*lead, *x.shape[1:]) for name, x in arrays.items()})
    return stored


def _quantize_blocks(kernel: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (nibbles, largest magnitude of each block, float32 [out, blocks]) of a kernel [in,
    out]."""
    num_in, num_out = kernel.shape
    blocks = kernel.T.astype(jnp.float32).reshape(num_out, num_in // BLOCK, BLOCK)
    absmax = jnp.abs(blocks).max(-1)
    unit = blocks / jnp.where(absmax > 0, absmax, 1.0)[..., None]
    # Codes are the number of thresholds strictly below.
    codes = jnp.searchsorted(jnp.asarray(THRESHOLDS), unit, method="compare_all").astype(jnp.uint8)
    codes = codes.reshape(num_out, num_in // 2, 2)
    return codes[..., 0] << 4 | codes[..., 1], absmax  # the first value in the high half


def quantize_absmax(absmax: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return (codes uint8, scales float32, offset) of block magnitudes; OUTER consecutive ones
    share a scale."""
    offset = absmax.mean()
    centered = absmax - offset
    outer = jnp.pad(centered, (0, -centered.size % OUTER)).reshape(-1, OUTER)
    scales = jnp.abs(outer).max(-1)
    unit = outer / jnp.where(scales > 0, scales, 1.0)[:, None]
    nearest = jnp.searchsorted(jnp.asarray(MIDDLES), unit).astype(jnp.uint8)
    return nearest.reshape(-1)[: centered.size], scales, offset


@jax.jit
def restore_absmax(absmax: jax.Array) -> jax.Array:
    """Return the magnitudes of all blocks of a tensor after a round trip through their storage."""
    codes, scales, offset = quantize_absmax(absmax.reshape(-1))
    restored = jnp.asarray(DYNAMIC)[codes] * jnp.repeat(scales, OUTER)[: codes.size] + offset
    return restored.reshape(absmax.shape)


def dequantize_nf4(
    parts: dict[str, jax.Array], dtype: jnp.dtype, group: jax.Array | None = None
) -> jax.Array:
    """Return the kernel [..., in, out] of its parts, summed in float32, cast to `dtype`.

    group: int32 [out, blocks] or [E, out, blocks], the scale of each of absmax; None: OUTER
    consecutive ones share a scale.
    """
    codes = parts["absmax"]
    if group is None:
        scales = jnp.repeat(parts["scales"], OUTER, axis=-1)
        scales = scales[..., : codes.shape[-2] * codes.shape[-1]].reshape(codes.shape)
    elif group.ndim == 2:
        scales = parts["scales"][..., group]
    else:
        index = jnp.broadcast_to(group, codes.shape).reshape(*codes.shape[:-2], -1)
        scales = jnp.take_along_axis(parts["scales"], index, -1).reshape(codes.shape)
    absmax = jnp.asarray(DYNAMIC)[codes] * scales + parts["offset"][..., None, None]
    return _unpack(parts["nibbles"], absmax, dtype)


def _unpack(nibbles: jax.Array, absmax: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Return the kernel [..., in, out] of its codes and block factors."""
    *lead, num_out, half = nibbles.shape
    index = jnp.stack([nibbles >> 4, nibbles & 15], axis=-1)
    levels = jnp.asarray(LEVELS)[index].reshape(*lead, num_out, -1, BLOCK)
    values = (levels * absmax[..., None]).reshape(*lead, num_out, 2 * half)
    return values.astype(dtype).swapaxes(-1, -2)


@jax.jit
def find_absmax(kernel: jax.Array) -> jax.Array:
    """Return float32 [out, blocks]: the largest magnitude of each block of a kernel [in, out]."""
    return _quantize_blocks(kernel)[1]


@jax.jit
def round_trip_with_absmax(kernel: jax.Array, absmax: jax.Array) -> jax.Array:
    """Return float32 [in, out]: a kernel after storage with the block factors `absmax` [out,
    blocks] of the tensor that it is a part of."""
    return _unpack(_quantize_blocks(kernel)[0], absmax, jnp.float32)
