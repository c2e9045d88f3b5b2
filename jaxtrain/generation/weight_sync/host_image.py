"""The newest weights as servers receive them: one block of host memory, written in place.

    pieces, from the device or the host    the loop thread waits for each to arrive
          v  chunks, in threads            compared with the last version (delta), copied
    image: all tensors end to end          shared with this host's servers (`shared_memory.py`)

`publish_weights.collect` is the plain reference for its contents.
"""

import itertools
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxtrain.huggingface.ops import Index, SplitPiece, full_index
from jaxtrain_vllm import wire
from jaxtrain_vllm.shared_memory import SharedMemorySegment

AHEAD_BYTES = 2**30
"""Bytes of pieces that may be in transfer from the device at once."""
CHUNK_ITEMS = 2**22
THREADS = min(16, os.cpu_count() or 1)
SPARSE = 16
"""If fewer than one in so many items changed, writing them one by one is faster."""
Place = int | Index
"""Start of a job's part in its tensor: a flat position if it is contiguous there, else its index,
of which only starts and steps are used."""
Part = tuple[np.ndarray, np.ndarray]
"""(flat positions, new values) of some changes."""


def as_numpy(dtype: str) -> np.dtype:
    """Return the numpy dtype of a name on the wire."""
    return np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def choose_dtypes(names: Iterable[str], dtype: str, wide: Collection[str]) -> dict[str, str]:
    """Return {tensor: dtype that is sent}, the wider ones first, so that all are aligned end to
    end."""
    chosen = {name: "float32" if name in wide else dtype for name in names}
    return dict(sorted(chosen.items(), key=lambda item: -wire.ITEM_BYTES[item[1]]))


def measure_all(shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, str]) -> dict[str, int]:
    """Return {tensor: bytes}."""
    return {
        name: int(np.prod(shapes[name], dtype=np.int64)) * wire.ITEM_BYTES[dtype]
        for name, dtype in dtypes.items()
    }


class DeviceChange(NamedTuple):
    """Changes that a device found in a piece, in place of its array."""

    count: Any
    """Number of changed items; if larger than the number of positions, they did not fit."""
    positions: Any
    """u32 flat positions in the piece, ascending."""
    values: Any
    read_all: Callable[[], Any]
    """Returns the whole array, for the case that the changes did not fit."""
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes in transfer."""
        return self.positions.nbytes + self.values.nbytes


class HostImage:
    """Image of all tensors of a model as raw bits of `dtype`, or float32 for those in `wide`."""

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], dtype: str, wide: Collection[str] = ()
    ):
        dtypes = choose_dtypes(shapes, dtype, wide)
        sizes = measure_all(shapes, dtypes)
        self.segment = SharedMemorySegment.create(sum(sizes.values()))
        self.tensors: dict[str, wire.WireTensor] = {}
        start = 0
        for name, chosen in dtypes.items():
            raw = self.segment.room[start : start + sizes[name]]
            bits = raw.view(wire.BITS[wire.ITEM_BYTES[chosen]])
            self.tensors[name] = wire.WireTensor(tuple(shapes[name]), chosen, bits)
            start += sizes[name]
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="weights")

    def take(
        self, pieces: Iterable[SplitPiece], *, compare: bool
    ) -> dict[str, wire.Changes] | None:
        """Overwrite the image with the pieces, which cover the whole model; with `compare`, return
        what changed.

        The pieces' memory is no longer needed when this returns. Their arrays are numpy's, or
        device memory that numpy can read.
        """
        self.segment.begin()
        missing = {name: tensor.bits.size for name, tensor in self.tensors.items()}
        parts: dict[str, list[Future[Part | None]]] = {name: [] for name in self.tensors}
        # Bounds the arrays that queued jobs keep alive.
        room = threading.BoundedSemaphore(4 * THREADS)
        for piece in look_ahead(pieces):
            tensor = self.tensors[piece.name]
            assert piece.shape == tensor.shape, f"{piece.name}: {piece.shape} is not {tensor.shape}"
            missing[piece.name] -= piece.array.size
            for job in self._cut(tensor, piece):
                room.acquire()
                done = self._pool.submit(job, compare)
                done.add_done_callback(lambda done: room.release())
                parts[piece.name].append(done)
        assert not any(missing.values()), f"unwritten parts: {[n for n, m in missing.items() if m]}"
        results = {name: [done.result() for done in jobs] for name, jobs in parts.items()}
        if not compare:
            return None
        joined = self._pool.map(self._join, results, results.values())
        return dict(zip(results, joined, strict=True))

    def _cut(self, tensor: wire.WireTensor, piece: SplitPiece) -> Iterator["WriteJob | ScatterJob"]:
        """Yield the jobs of a piece, some rows each, once it has arrived."""
        array: Any = piece.array
        if isinstance(array, DeviceChange):
            count = int(np.asarray(array.count))
            if count <= array.positions.size:
                yield ScatterJob(piece, tensor, array, count)
                return
            array = array.read_all()
        new = np.atleast_1d(np.asarray(array))
        old, flat = tensor.bits, piece.index == full_index(tensor.shape)
        old = old.reshape(new.shape) if flat else old.reshape(tensor.shape)[piece.index]
        width = new[:1].size
        rows = max(1, CHUNK_ITEMS // max(1, width))
        for start in range(0, len(new), rows):
            offset: Place = start * width
            if not flat:
                rows_index = piece.index[0]
                first = rows_index.start + start * (rows_index.step or 1)
                offset = (slice(first, None, rows_index.step), *piece.index[1:])
            stop = start + rows
            target = as_numpy(tensor.dtype)
            yield WriteJob(target, old[start:stop], new[start:stop], tensor, offset)

    def _join(self, name: str, parts: list[Part]) -> wire.Changes:
        tensor = self.tensors[name]
        kind = np.dtype("<u4") if tensor.bits.size <= 2**32 else np.dtype("<u8")
        positions = np.concatenate([part[0] for part in parts] or [np.empty(0, kind)])
        values = np.concatenate([part[1] for part in parts] or [np.empty(0, tensor.bits.dtype)])
        if len(parts) > 1 and np.any(positions[1:] < positions[:-1]):  # parts that lie side by side
            order = np.argsort(positions)
            positions, values = positions[order], values[order]
        return wire.Changes(positions.astype(kind, copy=False), values, tensor.bits.size)


class WriteJob(NamedTuple):
    """Job that writes `new` as `target` over `old`, and returns what that changes."""

    target: np.dtype
    old: np.ndarray
    new: np.ndarray
    tensor: wire.WireTensor
    """Tensor that contains `old`."""
    offset: Place

    def __call__(self, compare: bool) -> Part | None:
        old, size = self.old, self.tensor.bits.size
        new = self.new.astype(self.target, order="C", copy=False).view(old.dtype)
        if not compare:
            old[...] = new
            return None
        index = np.uint32 if size <= 2**32 else np.uint64
        if isinstance(self.offset, int):
            old, new = old.reshape(-1), new.reshape(-1)
            where = np.flatnonzero(old != new)
            values = new[where]
            if len(where) * SPARSE < new.size:
                old[where] = values
            else:
                old[...] = new
            where += self.offset
            return where.astype(index), values
        differing = np.nonzero(old != new)
        values = new[differing]
        old[...] = new
        moved = _moved(differing, self.offset)
        return np.ravel_multi_index(moved, self.tensor.shape).astype(index), values


class ScatterJob(NamedTuple):
    """Job that writes the changes that a device found."""

    piece: SplitPiece
    tensor: wire.WireTensor
    change: DeviceChange
    count: int

    def __call__(self, compare: bool) -> Part:
        shape = self.tensor.shape
        where: np.ndarray = np.asarray(self.change.positions)[: self.count]
        values = np.asarray(self.change.values)[: self.count].view(self.tensor.bits.dtype)
        part_index = self.piece.index
        if self.change.shape[1:] == shape[1:] and not any(part.step for part in part_index):  # rows
            first = part_index[0].start * math.prod(shape[1:]) if part_index else 0
            # u32 positions suffice for a piece, but the tensor may have more items than that.
            where = np.add(where, first, dtype=np.int64)
        else:
            inner = np.unravel_index(where, self.change.shape)
            where = np.asarray(np.ravel_multi_index(_moved(inner, part_index), shape))
        index = np.uint32 if self.tensor.bits.size <= 2**32 else np.uint64
        where = np.asarray(where, index)
        self.tensor.bits[where] = values
        return where, values.copy()  # the piece's memory may be reused


def _moved(inside: tuple[np.ndarray, ...], index: Index) -> tuple[np.ndarray, ...]:
    """Convert indices within a part to indices of its tensor."""
    pairs = zip(inside, index, strict=True)
    return tuple(positions * (part.step or 1) + part.start for positions, part in pairs)


def look_ahead(pieces: Iterable[Any]) -> Iterator[Any]:
    """Yield the pieces in order, but start some of them in advance, so that copies from a device
    overlap. A piece has an `array`."""
    source, waiting, size = iter(pieces), deque[Any](), 0
    for piece in itertools.chain(source, [None]):
        if piece is not None:
            waiting.append(piece)
            size += piece.array.nbytes
        while waiting and (piece is None or size > AHEAD_BYTES):
            size -= waiting[0].array.nbytes
            yield waiting.popleft()
