"""Weights cast and laid out as Hugging Face tensors on the device, on their way to the host.

The name map that loads and saves a model is traced. A stacked parameter is processed one layer at a
time, so that it needs little device memory; all layers share one compiled function.
"""

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.distributed.feed import to_host
from jaxtrain.distributed.mesh import HOST_MEMORY
from jaxtrain.generation.weight_sync.device_image import DeviceRows
from jaxtrain.generation.weight_sync.host_image import DeviceChange
from jaxtrain.huggingface.ops import Index, ParameterEntry, SplitPiece, StackedOps, TensorOp
from jaxtrain.models.parameters import Params
from jaxtrain_vllm.cuda_driver import CudaError

SMALL_BYTES = 2**26
"""A stack up to this size is processed in one call."""
BLOCK_BYTES = 2**27
ROOM, LEAST_ROOM = 16, 1024
"""At most one change in ROOM items (or LEAST_ROOM changes) is fetched from the device; if there are
more, the whole array is."""


class PublishedCopy:
    """The last published weights on their devices, against which the next ones are compared."""

    def __init__(self):
        self._arrays: dict[Any, jax.Array] = {}

    def replace(self, piece: SplitPiece, *, compare: bool) -> SplitPiece:
        """Store a piece's array, of one device; with `compare`, return its changes instead."""
        new: Any = piece.array
        key = (piece.name, tuple((part.start, part.stop) for part in piece.index))
        old, self._arrays[key] = self._arrays.get(key), new
        if not compare or old is None:
            return piece._replace(array=_to_pinned(new))
        room = min(new.size, max(LEAST_ROOM, new.size // ROOM))
        changes = (_to_pinned(array) for array in _find_changes(old, new, room))
        return piece._replace(array=DeviceChange(*changes, lambda: _to_pinned(new), new.shape))


def list_pieces(
    params: Params,
    entries: list[ParameterEntry],
    dtype: str,
    published: PublishedCopy | None = None,
    *,
    compare: bool = False,
    wide: Collection[str] = (),
) -> Iterator[SplitPiece]:
    """Yield all Hugging Face tensors of a model in `dtype`, or float32 for those in `wide`, rounded
    to nearest even.

    With one process the arrays are jax's, already being copied to pinned host memory; with
    `compare` they are the changes since the pieces that were `published`. With several processes,
    which must all consume the iterator, one layer is gathered at a time.
    """
    for entry in entries:
        value = params[entry.param]
        sent = sent_as(entry, value, dtype, wide)
        if value.is_fully_addressable:
            for piece in lay_out(entry.op, value, sent):
                if published is None:
                    yield piece._replace(array=_to_pinned(piece.array))
                else:
                    yield published.replace(piece, compare=compare)
        else:
            yield from entry.op.write(value, partial(_gather, dtype=sent))


def sent_as(entry: ParameterEntry, value: Any, dtype: str, wide: Collection[str]) -> str:
    """Return the dtype in which a parameter's tensors are sent: all in float32, or none."""
    if not wide:
        return dtype
    return "float32" if any(name in wide for name in entry.op.shapes(value.shape)) else dtype


def list_rows(
    params: Params,
    entries: list[ParameterEntry],
    dtype: str,
    homes: Mapping[str, Any],
    wide: Collection[str] = (),
) -> Iterator[DeviceRows]:
    """Yield all Hugging Face tensors of a model of one process in `dtype` (float32 for `wide`),
    each on its device in `homes`; CudaError for a part of a tensor that is not whole rows."""
    for entry in entries:
        value = params[entry.param]
        for piece in _write_all(entry.op, value, sent_as(entry, value, dtype, wide)):
            array: Any = piece.array
            if any(
                (part.start, part.stop) != (0, size)
                for part, size in zip(piece.index[1:], piece.shape[1:], strict=True)
            ):
                raise CudaError(f"{piece.name} is put together from columns")
            home = homes[piece.name]
            if array.devices() != {home}:
                array = _move_home(array, value.sharding, home)
            first = piece.index[0].start if piece.index else 0
            yield DeviceRows(piece.name, first, array, _sum_rows(array, first))


def _move_home(array: jax.Array, sharding: Any, home: Any) -> jax.Array:
    """Return the whole array on one device."""
    if len(array.devices()) > 1:
        everywhere = jax.NamedSharding(sharding.mesh, jax.P())
        copies = jax.jit(_same, out_shardings=everywhere)(array).addressable_shards
        return next((copy.data for copy in copies if copy.device == home), copies[0].data)
    return jax.device_put(array, home)


def _same(array: jax.Array) -> jax.Array:
    return array


@jax.jit
def _sum_rows(array: jax.Array, first: Any) -> jax.Array:
    """Return a part of a tensor's sum, modulo 2**32; see `wire.combine_sums`. first: its first
    row."""
    bits = "int16" if array.dtype.itemsize == 2 else "int32"
    signed = jax.lax.bitcast_convert_type(array, bits)
    rows = signed.reshape(array.shape[0] if array.ndim else 1, -1)
    # int32 overflow wraps around in XLA, which is the sum modulo 2**32.
    sums = rows.astype("int32").sum(1, dtype="int32")
    weights = jnp.arange(1, len(sums) + 1, dtype="int32") + jnp.int32(first)
    return (sums * weights).sum(dtype="int32")


def lay_out(op: TensorOp, value: jax.Array, dtype: str) -> Iterator[SplitPiece]:
    """Yield the pieces of one parameter on their devices; a sharded piece yields one per shard."""
    for piece in _write_all(op, value, dtype):
        array: Any = piece.array
        for shard in array.addressable_shards:
            if shard.replica_id == 0:  # replicas hold the same rows
                where = _compose(piece.index, shard.index)
                for rows, block in _cut_rows(shard.data):
                    yield piece._replace(index=_compose(where, rows), array=block)


def _write_all(op: TensorOp, value: jax.Array, dtype: str) -> Iterator[SplitPiece]:
    """Yield the pieces of one parameter; their arrays are sharded as XLA chooses."""
    if isinstance(op, StackedOps) and value.nbytes > SMALL_BYTES:
        calls = [(part, index) for index, part in enumerate(op.ops)]
    else:
        calls = [(op, None)]
    for part, index in calls:
        template = np.broadcast_to(np.zeros((), bool), value.shape[index is not None :])
        named = list(part.write(template, lambda array: array))
        arrays: Any = _write(_without_names(part), dtype, value, index)
        for piece, array in zip(named, arrays, strict=True):
            yield piece._replace(array=array)


@partial(jax.jit, static_argnums=(0, 1))
def _write(op: TensorOp, dtype: str, value: jax.Array, index: Any) -> list[jax.Array]:
    part = value if index is None else jax.lax.dynamic_index_in_dim(value, index, keepdims=False)
    written = op.write(part.astype(jnp.dtype(dtype)), lambda array: array)
    return [jnp.asarray(piece.array) for piece in written]


def _gather(part: Any, dtype: str) -> np.ndarray:
    return to_host(_cast(part, dtype) if isinstance(part, jax.Array) else part)


@partial(jax.jit, static_argnums=1)
def _cast(array: jax.Array, dtype: str) -> jax.Array:
    return array.astype(jnp.dtype(dtype))


@partial(jax.jit, static_argnums=2)
def _find_changes(old: jax.Array, new: jax.Array, room: int) -> tuple[jax.Array, ...]:
    """Return (number of items whose bits differ, flat positions of the first `room` of them, new
    values)."""
    bits = "uint16" if new.dtype.itemsize == 2 else "uint32"
    # Bits, not values: NaN differs from itself, and -0.0 equals 0.0.
    old_bits, new_bits = (jax.lax.bitcast_convert_type(a, bits).reshape(-1) for a in (old, new))
    differs = old_bits != new_bits
    running_count = jnp.cumsum(differs, dtype="int32")
    # Unchanged items, and changes beyond `room`, get an index out of range, which "drop" ignores.
    target = jnp.where(differs, running_count - 1, room)
    every = jnp.arange(new.size, dtype="uint32")
    empty = jnp.zeros(room, "uint32")
    positions = empty.at[target].set(every, mode="drop", unique_indices=True)
    return running_count[-1], positions, new_bits[positions]


def _cut_rows(array: jax.Array) -> Iterator[tuple[Index, Any]]:
    """Yield blocks of rows of a single-device array, none much larger than BLOCK_BYTES. Copies of
    few different sizes reuse pinned host memory; allocating new one is slow."""
    count = -(-array.nbytes // BLOCK_BYTES)
    if count < 2 or array.ndim == 0:
        yield tuple(slice(0, size) for size in array.shape), array
        return
    height = -(-array.shape[0] // count)
    for start in range(0, array.shape[0], height):
        size = min(height, array.shape[0] - start)
        block = _take_rows(array, start, size)
        yield (slice(start, start + size), *(slice(0, n) for n in array.shape[1:])), block


@partial(jax.jit, static_argnums=2)
def _take_rows(array: jax.Array, start: Any, size: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(array, start, size)


def _to_pinned(array: Any) -> Any:
    """Start a copy to pinned host memory, which the device writes directly and numpy reads in
    place."""
    [device] = array.devices()
    if device.platform == "cpu" or HOST_MEMORY not in {
        m.kind for m in device.addressable_memories()
    }:
        return array
    return jax.device_put(array, jax.sharding.SingleDeviceSharding(device, memory_kind=HOST_MEMORY))


def _without_names(op: TensorOp) -> TensorOp:
    """Return the op without tensor names, as the key of a compiled function that all layers
    share."""
    if isinstance(op, StackedOps):
        return StackedOps(tuple(_without_names(part) for part in op.ops))
    nested: Any = op
    if hasattr(nested, "op"):
        return dataclasses.replace(nested, op=_without_names(nested.op))
    return dataclasses.replace(nested, name="")


def _compose(index: Index, inner: tuple[slice, ...]) -> Index:
    """Return the slice of a slice."""
    slices = []
    for outer, part in zip(index, inner, strict=True):
        step = outer.step or 1
        start, stop, _ = part.indices(len(range(outer.start, outer.stop, step)))
        last = outer.start + (stop - 1) * step
        slices.append(slice(outer.start + start * step, last + 1, outer.step))
    return tuple(slices)
