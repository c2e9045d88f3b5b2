"""Optimizer moments in fewer bits than they are computed in: bfloat16, or blocks of 8 or 4 bits.

    moments as stored ─> float32 ─> any optax transformation ─> float32 ─> stored again
                                             └─> updates, of moments before they are rounded

8 bits are those of bitsandbytes' optimizers (Dettmers et al. 2022, arXiv:2110.02861): a code a
number, a float32 scale a block, levels dense where numbers are small; a second moment, never
negative, has twice as many. Other than there, one above zero is never stored as zero: the next
update would divide by next to nothing (Li et al. 2023, arXiv:2309.01507). Small arrays, norms,
biases and token embeddings stay float32. 4 bits are those of torchao's AdamW4bit and of that paper:
the same map with three decades for first moments, sixteen even levels without zero for second ones.

Blocks lie along the last axis and are the same on every mesh, so a checkpoint is, too. Shards of
whole blocks are quantized where they lie; where a mesh cuts that axis finer than BLOCK, devices
that share a block agree on its scale and each holds it.
"""

import math
import zlib
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain.layers.noise import GOLDEN, hash_bits
from jaxtrain.models.parameters import Params

Kind = Literal["float32", "bfloat16", "int8", "int4"]
BITS = {"int8": 8, "int4": 4}

BLOCK = 128
"""Numbers that share a scale; fewer if the last axis is not a multiple. (bitsandbytes blocks the
flattened array by 256, but shards of a matrix would cut such blocks.)"""
FEWEST = 8
"""Smallest block that saves enough memory: arrays with smaller ones stay float32."""
SMALL = 4096
"""Arrays of fewer numbers stay float32."""
DECADES = {8: 7, 4: 3}
"""Powers of ten that the levels of a code of so many bits span."""


class QuantizedBlocks(NamedTuple):
    """Numbers [..., n] in 8 or 4 bits."""

    codes: jax.Array
    """uint8 [..., n], or [..., n / 2] with the first of two in the upper half: place among the
    levels in order; in the signed tables 127 or 7 is zero."""
    scales: jax.Array
    """float32 [..., n / block]: the largest magnitude of each block."""


class StoredState(NamedTuple):
    """State of `store_moments`."""

    count: jax.Array
    """int32 number of updates, the seed of stochastic rounding."""
    inner: Any
    """State of `inner` with its stored moments."""


def store_moments(
    inner: optax.GradientTransformation,
    kind: Kind,
    keeps: Callable[[str], bool] = lambda path: False,
    block: int = BLOCK,
) -> optax.GradientTransformation:
    """Wrap `inner` so that its moments (slots of a parameter's path and shape) are stored as
    `kind`.

    Updates come in the parameters' dtype. A slot named `nu` is a second moment: it is not negative,
    and in bfloat16 it is rounded up or down at random, in proportion, because the nearest would
    lose every change below half a unit in the last place (1/512 to 1/256), and beta2 = 0.999 makes
    few larger ones. keeps: paths that "int8" and "int4" leave in float32, besides small arrays.
    """

    def pack(state: Any, params: Params, count: jax.Array) -> Any:
        def pack_leaf(where: tuple, slot: jax.Array) -> Any:
            path = _find_owner(where, slot, params)
            if path is None:
                return slot
            value, second = slot.astype(jnp.float32), _is_second(where)
            size = block_size(slot.shape, block)
            if kind in BITS and size and not keeps(path):
                return quantize(value, signed=not second, block=size, bits=BITS[kind])
            if kind != "bfloat16":
                return value
            if not second:
                return value.astype(jnp.bfloat16)
            return round_at_random(
                # Not hash(), which Python salts in every process: devices of several would round
                # apart.
                value,
                hash_bits(count.astype(jnp.uint32), zlib.crc32(path.encode())),
            )

        return jax.tree_util.tree_map_with_path(pack_leaf, state)

    def unpack(state: Any, params: Params) -> Any:
        def unpack_leaf(where: tuple, slot: Any) -> Any:
            if isinstance(slot, QuantizedBlocks):
                return dequantize(slot, signed=not _is_second(where), bits=BITS[kind])
            return slot if _find_owner(where, slot, params) is None else slot.astype(jnp.float32)

        return jax.tree_util.tree_map_with_path(
            unpack_leaf, state, is_leaf=lambda slot: isinstance(slot, QuantizedBlocks)
        )

    def init(params: Any) -> StoredState:
        count = jnp.zeros((), jnp.int32)
        return StoredState(count, pack(inner.init(params), params, count))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, StoredState]:
        assert params is not None, "moments are found by the parameters' paths"
        # The rule runs in float32; only what lies between two steps is rounded.
        wide_updates, wide_params = _widen(updates), _widen(params)
        new_updates, after = inner.update(wide_updates, unpack(state.inner, params), wide_params)
        new_updates = jax.tree.map(
            lambda value, update: value.astype(update.dtype), new_updates, updates
        )
        # The count is saved with the state: a resumed run rounds as this one would have.
        return new_updates, StoredState(state.count + 1, pack(after, params, state.count))

    return optax.GradientTransformation(init, update)


def _widen(tree: Any) -> Any:
    return jax.tree.map(lambda value: value.astype(jnp.float32), tree)


def _find_owner(key_path: tuple, slot: Any, params: Params) -> str | None:
    """Return the path of the parameter whose moment a state's slot is; None for any other slot."""
    keys = (part.key for part in key_path if isinstance(part, jax.tree_util.DictKey))
    path = next((key for key in keys if key in params), None)
    return path if path is not None and params[path].shape == slot.shape else None


def _is_second(where: tuple) -> bool:
    return any(getattr(part, "name", None) == "nu" for part in where)


def block_size(shape: tuple[int, ...], block: int = BLOCK) -> int:
    """Return the block size for an array of that shape; 0 if it stays float32."""
    size = math.gcd(shape[-1], block) if shape else 0
    return size if size >= FEWEST and math.prod(shape) >= SMALL else 0


def levels(signed: bool, bits: int = 8) -> np.ndarray:
    """Return the sorted levels of the codes, float32 [256] or [16], as in bitsandbytes'
    create_dynamic_map, but those of unsigned codes of 4 bits, which are even.

    Decade d of n has the middles of 2^d (signed) or 2^(d+1) cells from 0.1 to 1 times 10^(d-n+1);
    besides, there are 0 and 1.
    """
    if bits == 4 and not signed:
        return np.arange(1, 17, dtype=np.float32) / 16
    positive = []
    for decade in range(DECADES[bits]):
        bounds = np.linspace(0.1, 1, 2 ** (decade if signed else decade + 1) + 1, dtype=np.float32)
        positive += list((bounds[:-1] + bounds[1:]) / 2 * 10.0 ** (decade - DECADES[bits] + 1))
    negative = [-value for value in positive] if signed else []
    return np.sort(np.array([*positive, *negative, 0.0, 1.0], np.float32))


def quantize(x: jax.Array, signed: bool, block: int, bits: int = 8) -> QuantizedBlocks:
    """Round float32 [..., n] to the nearest level of x / its block's largest magnitude; unsigned, a
    number above zero never becomes zero.

    The level is computed, not searched: thresholds give the decade, whose cells are even.
    """
    blocks = x.reshape(*x.shape[:-1], -1, block)
    scales = jnp.abs(blocks).max(-1)
    unit = blocks / jnp.where(scales > 0, scales, 1.0)[..., None]
    if bits == 8 or signed:
        code = _find_levels(unit, signed, bits)
    else:
        code = jnp.maximum(jnp.floor(unit * 16 + 0.5).astype(jnp.int32) - 1, 0)
    code = code.reshape(x.shape).astype(jnp.uint8)
    return QuantizedBlocks(code if bits == 8 else code[..., ::2] << 4 | code[..., 1::2], scales)


def _find_levels(unit: jax.Array, signed: bool, bits: int) -> jax.Array:
    """Return the nearest levels of the dynamic map, int32, of numbers up to 1 in magnitude."""
    magnitude = jnp.abs(unit)
    table = levels(signed, bits)
    zero, decades = len(table) // 2 - 1, DECADES[bits]
    table = table[zero:] if signed else table  # zero, the decades, one
    # Levels below a decade: 1, 2, 4 ... (signed), 1, 3, 7 ...; cells in it: 1, 2, 4 or 2, 4, 8 ...
    cells = 2 ** np.arange(decades) * (1 if signed else 2)
    below = np.cumsum(np.append(1, cells))
    starts = ((table[below] + table[below - 1]) / 2).astype(np.float32)
    tens = 10.0 ** np.arange(decades - 1, -1, -1)
    decade = sum((magnitude >= start).astype(jnp.int32) for start in starts[:-1]) - 1
    decade_index = jnp.maximum(decade, 0)
    cell = jnp.floor(
        magnitude * jnp.asarray((tens * cells / 0.9).astype(np.float32))[decade_index]
        - jnp.asarray((cells / 9).astype(np.float32))[decade_index]
    ).astype(jnp.int32)
    cell = jnp.clip(cell, 0, jnp.asarray(cells, jnp.int32)[decade_index] - 1)
    code = jnp.where(decade < 0, 0, jnp.asarray(below[:-1], jnp.int32)[decade_index] + cell)
    top = int(below[-1])
    if signed:  # the largest level below zero is the one before -1, which there is not
        code = jnp.where(unit >= starts[-1], top, code)
        return zero + jnp.where(unit < 0, -code, code)
    code = jnp.where(magnitude >= starts[-1], top, code)
    return jnp.where(unit > 0, jnp.maximum(code, 1), 0)


def dequantize(blocks: QuantizedBlocks, signed: bool, bits: int = 8) -> jax.Array:
    """Return the numbers float32 [..., n]."""
    codes, scales = blocks
    if bits == 4:
        codes = jnp.stack([codes >> 4, codes & 15], -1).reshape(*codes.shape[:-1], -1)
    unit = jnp.asarray(levels(signed, bits))[codes.astype(jnp.int32)]
    unit = unit.reshape(*scales.shape, -1) * scales[..., None]
    return unit.reshape(codes.shape)


def round_at_random(x: jax.Array, word: jax.Array) -> jax.Array:
    """Round float32 to bfloat16 stochastically, so that the mean is unchanged.

    word: uint32; what a number draws depends on it and on the number's place in the whole array,
    so that no mesh draws other ones.
    """
    places = jnp.zeros(x.shape, jnp.uint32)
    stride = 1
    for axis in reversed(range(x.ndim)):
        iota = jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
        places += iota * jnp.uint32(stride * GOLDEN & 0xFFFFFFFF)
        stride *= x.shape[axis]
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + (hash_bits(places ^ word) >> 16)
    return jax.lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)
