"""Optimizer moments stored in fewer bits than they are computed in: bfloat16, or 8-bit blocks.

    moments as stored ─> float32 ─> any optax transformation ─> float32 ─> stored again
                                             └─> updates, of moments before they are rounded

8 bits are those of bitsandbytes' optimizers (Dettmers et al. 2022, arXiv:2110.02861): a code a
number, a float32 scale a block, levels dense where numbers are small; a second moment, never
negative, has twice as many. Other than there, one above zero is never stored as zero: the next
update would divide by next to nothing (Li et al. 2023, arXiv:2309.01507). Small arrays, norms,
biases and token embeddings stay float32.

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

Kind = Literal["float32", "bfloat16", "int8"]

BLOCK = 128
"""Numbers that share a scale; fewer if the last axis is not a multiple. (bitsandbytes blocks the
flattened array by 256, but shards of a matrix would cut such blocks.)"""
FEWEST = 8
"""Smallest block that saves enough memory: arrays with smaller ones stay float32."""
SMALL = 4096
"""Arrays of fewer numbers stay float32."""
DECADES = 7


class QuantizedBlocks(NamedTuple):
    """Numbers [..., n] in 8 bits."""

    codes: jax.Array
    """uint8 [..., n]: place among the levels in order; in the signed table 127 is zero."""
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
    few larger ones. keeps: paths that "int8" leaves in float32, besides small arrays.
    """

    def pack(state: Any, params: Params, count: jax.Array) -> Any:
        def one(where: tuple, slot: jax.Array) -> Any:
            path = _find_owner(where, slot, params)
            if path is None:
                return slot
            value, second = slot.astype(jnp.float32), _is_second(where)
            size = block_size(slot.shape, block)
            if kind == "int8" and size and not keeps(path):
                return quantize(value, signed=not second, block=size)
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

        return jax.tree_util.tree_map_with_path(one, state)

    def unpack(state: Any, params: Params) -> Any:
        def one(where: tuple, slot: Any) -> Any:
            if isinstance(slot, QuantizedBlocks):
                return dequantize(slot, signed=not _is_second(where))
            return slot if _find_owner(where, slot, params) is None else slot.astype(jnp.float32)

        return jax.tree_util.tree_map_with_path(
            one, state, is_leaf=lambda slot: isinstance(slot, QuantizedBlocks)
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


def levels(signed: bool) -> np.ndarray:
    """Return the sorted levels of the codes, float32 [256], as in bitsandbytes' create_dynamic_map.

    Decade d of DECADES has the middles of 2^d (signed) or 2^(d+1) cells from 0.1 to 1 times
    10^(d-6); besides, there are 0 and 1.
    """
    positive = []
    for decade in range(DECADES):
        bounds = np.linspace(0.1, 1, 2 ** (decade if signed else decade + 1) + 1, dtype=np.float32)
        positive += list((bounds[:-1] + bounds[1:]) / 2 * 10.0 ** (decade - DECADES + 1))
    negative = [-value for value in positive] if signed else []
    return np.sort(np.array([*positive, *negative, 0.0, 1.0], np.float32))


def quantize(x: jax.Array, signed: bool, block: int) -> QuantizedBlocks:
    """Round float32 [..., n] to the nearest level of x / its block's largest magnitude; unsigned, a
    number above zero never becomes zero.

    The level is computed, not searched: thresholds give the decade, whose cells are even.
    """
    blocks = x.reshape(*x.shape[:-1], -1, block)
    scales = jnp.abs(blocks).max(-1)
    unit = blocks / jnp.where(scales > 0, scales, 1.0)[..., None]
    magnitude = jnp.abs(unit)
    table = levels(signed)
    table = table[127:] if signed else table  # zero, the decades, one
    # Levels below a decade: 1, 2, 4 ... (signed), 1, 3, 7 ...; cells in it: 1, 2, 4 or 2, 4, 8 ...
    cells = 2 ** np.arange(DECADES) * (1 if signed else 2)
    below = np.cumsum(np.append(1, cells))
    starts = ((table[below] + table[below - 1]) / 2).astype(np.float32)
    tens = 10.0 ** np.arange(DECADES - 1, -1, -1)
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
        code = 127 + jnp.where(unit < 0, -code, code)
    else:
        code = jnp.where(magnitude >= starts[-1], top, code)
        code = jnp.where(unit > 0, jnp.maximum(code, 1), 0)
    return QuantizedBlocks(code.reshape(x.shape).astype(jnp.uint8), scales)


def dequantize(blocks: QuantizedBlocks, signed: bool) -> jax.Array:
    """Return the numbers float32 [..., n]."""
    codes, scales = blocks
    unit = jnp.asarray(levels(signed))[codes.astype(jnp.int32)]
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
