"""Message format of trainer and server for weights over TCP, and the format of deltas.

    both                 the handshake of `handshake.py`
    worker  -> trainer   hello   {server, rank, tensors: {name: shape or null}, serves: [version,
                                 checksum] of this trainer's, or null}
    trainer -> worker    stage   {version, kind: full or delta, base, tensors, checksum} + bytes
    trainer -> worker    stage   {version, kind: shared, segment, tensors, checksum}
    trainer -> worker    stage   {version, kind: lent, memory, tensors (and where), checksum}
    trainer -> worker    stage   full or delta without bytes: from {place?, bytes, streams, seconds}
                                 they are fetched (`payloads.py`), from a worker or the trainer
    worker  -> trainer   staged  {version, segment?, place?}, or {error}, and the last version
                                 stays; place: address for others, if the message has pass_on
    trainer -> worker    status  {}
    worker  -> trainer   status  {version, checksum} of what the model holds

A message is b"JXW1", the header's length as u32 and its JSON, then header["bytes"] raw bytes. All
numbers are little-endian. Tensors travel as raw bits; no dtype is interpreted.
A delta contains new values, not differences, so that applying it is exact and idempotent
(AstraFlow's delta transfer). Their places are given by positions or, if shorter, by one bit for
each item of the tensor. Tensors of kind "shared" lie in memory that the worker can open
(`shared_memory.py`), those of kind "lent" in GPU memory (`cuda_ipc.py`).
"""

import contextlib
import json
import math
import os
import reprlib
import socket
import struct
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

MAGIC = b"JXW1"
MAX_HEADER_BYTES = 64 * 2**20
MAX_PAYLOAD_BYTES = 2**42
MAX_ITEMS = 2**40
"""Limit for the items of one tensor."""
CHUNK_BYTES = 2**23
"""Size of the pieces that are sent, and checksummed in parallel."""
THREADS = min(16, os.cpu_count() or 1)
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
BITS = {2: np.dtype("<u2"), 4: np.dtype("<u4")}


class WireError(Exception):
    """Raised when the other side sent a malformed message, or closed the connection."""


class WireTensor(NamedTuple):
    """The raw bits of a tensor."""

    shape: tuple[int, ...]
    dtype: str
    """A key of ITEM_BYTES."""
    bits: np.ndarray
    """Unsigned and flat, as wide as an item."""


Tensors = Mapping[str, WireTensor]


class Changes(NamedTuple):
    """The items of a tensor whose bits differ from the last version's."""

    positions: np.ndarray
    """Ascending flat positions, u32 (u64 in a tensor of more than 2**32 items)."""
    values: np.ndarray
    """The new bits at those positions."""
    size: int
    """Items of the tensor."""

    @property
    def as_mask(self) -> bool:
        """Return True if one bit per item of the tensor is shorter than the positions."""
        return self.size < 8 * self.positions.nbytes

    @property
    def nbytes(self) -> int:
        """Return the bytes of the changes in a message."""
        if not self.positions.size:
            return 0
        where = -(-self.size // 8) if self.as_mask else self.positions.nbytes
        return where + self.values.nbytes


def empty_bits(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Return uninitialized bits for a tensor."""
    return np.empty(int(np.prod(shape, dtype=np.int64)), BITS[ITEM_BYTES[dtype]])


def find_changes(old: np.ndarray, new: np.ndarray) -> Changes:
    """Return the changes from the bits `old` to `new`, both flat and of one width."""
    positions = np.flatnonzero(old != new)
    index = np.dtype("<u4") if new.size <= 2**32 else np.dtype("<u8")
    return Changes(positions.astype(index), new[positions], new.size)


def apply_changes(bits: np.ndarray, changes: Changes) -> Changes:
    """Write the changes into `bits`; return the changes that undo them."""
    undo = Changes(changes.positions, bits[changes.positions], bits.size)
    bits[changes.positions] = changes.values
    return undo


def checksum(tensors: Tensors) -> int:
    """Return the CRC-32 of all names, shapes, dtypes and of the CRC-32 of each chunk of the bits,
    independent of the order of the mapping."""
    chunks: list[memoryview] = []
    counts = {}
    for name, tensor in tensors.items():
        raw = np.ascontiguousarray(tensor.bits).data.cast("B")
        parts = [raw[start : start + CHUNK_BYTES] for start in range(0, len(raw), CHUNK_BYTES)]
        counts[name] = (len(chunks), len(parts))
        chunks += parts
    sums = in_threads(zlib.crc32, chunks, sum(map(len, chunks)))
    crc = 0
    for name in sorted(tensors):
        shape, dtype, _ = tensors[name]
        first, count = counts[name]
        crc = zlib.crc32(f"{name} {tuple(shape)} {dtype}\n".encode(), crc)
        crc = zlib.crc32(struct.pack(f"<{count}I", *sums[first : first + count]), crc)
    return crc


def combine_sums(tensors: Tensors, sums: Mapping[str, int]) -> int:
    """Return the checksum of tensors in GPU memory, from a sum for each, independent of their
    order: the CRC-32 of all names, shapes, dtypes and sums modulo 2**32.

    The sum of a tensor: (i + 1) times the sum of the signed bits of row i, over all rows. It can be
    accumulated from any pieces of whole rows, and detects permuted rows.
    """
    crc = 0
    for name in sorted(tensors):
        shape, dtype, _ = tensors[name]
        text = f"{name} {tuple(shape)} {dtype} {int(sums[name]) % 2**32}\n"
        crc = zlib.crc32(text.encode(), crc)
    return crc


def add_up(tensor: WireTensor) -> int:
    """Return the sum of a tensor on the host, for `combine_sums`, modulo 2**64."""
    signed = tensor.bits.view(f"<i{tensor.bits.itemsize}")
    rows = signed.reshape(tensor.shape[0] if tensor.shape else 1, -1).sum(1, dtype=np.int64)
    return int((rows * np.arange(1, len(rows) + 1)).sum())


def in_threads(work: Callable[[Any], Any], items: Iterable[Any], size: int) -> list[Any]:
    """Map `work` over the items, in threads if `size` bytes justify it: numpy and zlib release the
    GIL while they process large arrays."""
    items = list(items)
    if size < 2 * CHUNK_BYTES or len(items) < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(min(THREADS, len(items))) as pool:
        return list(pool.map(work, items))


def pack_full(tensors: Tensors) -> tuple[list[dict[str, Any]], list[np.ndarray]]:
    """Return (descriptions for the header, payload) of whole tensors."""
    described = [
        {"name": name, "shape": list(tensor.shape), "dtype": tensor.dtype}
        for name, tensor in tensors.items()
    ]
    return described, [tensor.bits for tensor in tensors.values()]


def pack_delta(changes: Mapping[str, Changes]) -> tuple[list[dict[str, Any]], list[np.ndarray]]:
    """Return (descriptions for the header, payload) of changes, without unchanged tensors."""
    described, payload = [], []
    for name, change in changes.items():
        where = change.positions
        if not where.size:
            continue
        item = {"name": name, "count": where.size, "index_bytes": where.itemsize}
        if change.as_mask:
            mask = np.zeros(change.size, bool)
            mask[where] = True
            item["index_bytes"], where = 0, np.packbits(mask)
        described.append(item)
        payload += [where, change.values]
    return described, payload


def unpack_full(
    described: list[dict[str, Any]], payload: memoryview, *, copy: bool = True
) -> dict[str, WireTensor]:
    """Return the whole tensors of a message, copied out of it or in place."""
    tensors, start = {}, 0
    for item in described:
        shape, dtype, _ = measure(item)
        bits = _take(payload, start, math.prod(shape), BITS[ITEM_BYTES[dtype]])
        tensors[item["name"]] = WireTensor(shape, dtype, bits.copy() if copy else bits)
        start += bits.nbytes
    _check_end(start, payload)
    return tensors


def unpack_delta(
    described: list[dict[str, Any]], payload: memoryview, base: Tensors
) -> dict[str, Changes]:
    """Return the changes of a message, checked against the tensors that they belong to."""
    changes, start = {}, 0
    for item in described:
        if item["name"] not in base:
            raise WireError(f"a delta of {item['name']}, which the last version has not")
        bits, count = base[item["name"]].bits, item["count"]
        if type(count) is not int or not 0 <= count <= bits.size:
            raise WireError(f"{count!r} places for {bits.size} items of {item['name']}")
        if item["index_bytes"] not in (0, 4, 8):
            raise WireError(f"positions of {item['index_bytes']!r} bytes")
        if item["index_bytes"]:
            positions = _take(payload, start, count, np.dtype(f"<u{item['index_bytes']}"))
            start += positions.nbytes
        else:  # one bit for each item of the tensor
            mask = _take(payload, start, -(-bits.size // 8), np.dtype("u1"))
            start += mask.nbytes
            positions = np.flatnonzero(np.unpackbits(mask, count=bits.size))
            if positions.size != count:
                raise WireError(f"{positions.size} places for {count} values of {item['name']}")
        values = _take(payload, start, count, bits.dtype)
        start += values.nbytes
        changes[item["name"]] = Changes(positions, values, bits.size)
    _check_end(start, payload)

    def reaches_out(change: Changes) -> bool:
        return bool(change.positions.size) and int(change.positions.max()) >= change.size

    reaching = in_threads(reaches_out, changes.values(), len(payload))
    for name in (name for name, outside in zip(changes, reaching, strict=True) if outside):
        raise WireError(f"a delta of {name} points outside of it")
    return changes


def measure(item: Mapping[str, Any]) -> tuple[tuple[int, ...], str, int]:
    """Return (shape, dtype, bytes) of a tensor that a message describes."""
    shape, dtype = _read_shape(item), item["dtype"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise WireError(f"{item['name']} has dtype {dtype!r}; known: {sorted(ITEM_BYTES)}")
    return shape, dtype, math.prod(shape) * ITEM_BYTES[dtype]


def _read_shape(item: Mapping[str, Any]) -> tuple[int, ...]:
    shape = item["shape"]
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise WireError(f"{item['name']} has shape {reprlib.repr(shape)}")
    if math.prod(shape) > MAX_ITEMS:
        raise WireError(f"{item['name']} has {math.prod(shape)} items")
    return tuple(shape)


def _take(payload: memoryview, start: int, count: int, dtype: np.dtype) -> np.ndarray:
    if start + count * dtype.itemsize > len(payload):
        raise WireError(f"a message of {len(payload)} bytes ends too early")
    return np.frombuffer(payload, dtype, count, start)


def _check_end(end: int, payload: memoryview) -> None:
    if end != len(payload):
        raise WireError(f"a message holds {len(payload)} bytes, its header describes {end}")


def send_message(
    connection: socket.socket,
    header: Mapping[str, Any],
    payload: Iterable[np.ndarray] = (),
    on_sent: Callable[[], None] = lambda: None,
) -> int:
    """Send a message; return the bytes of its payload. on_sent: called after each piece of it: the
    connection's time-out applies to a piece."""
    parts = [np.ascontiguousarray(part).data.cast("B") for part in payload]
    size = sum(len(part) for part in parts)
    text = json.dumps({**header, "bytes": size}).encode()
    connection.sendall(MAGIC + struct.pack("<I", len(text)) + text)
    for part in parts:
        for start in range(0, len(part), CHUNK_BYTES):
            connection.sendall(part[start : start + CHUNK_BYTES])
            on_sent()
    return size


def receive_message(
    connection: socket.socket,
    max_header: int = MAX_HEADER_BYTES,
    max_payload: int = MAX_PAYLOAD_BYTES,
    room: Callable[[dict[str, Any], int], memoryview | None] = lambda header, size: None,
) -> tuple[dict[str, Any], memoryview]:
    """Return (header, payload) of the next message.

    Raises WireError if there is none, or if it exceeds the limits, before its payload is read.
    room: returns memory of exactly the payload's size for a header, or None for new memory.
    """
    start = _receive(connection, _new_room(8))
    if bytes(start[:4]) != MAGIC:
        raise WireError(f"expected a message, got {bytes(start)!r}")
    (length,) = struct.unpack("<I", start[4:])
    if length > max_header:
        raise WireError(f"a header of {length} bytes; at most {max_header} are taken")
    try:
        header = json.loads(bytes(_receive(connection, _new_room(length))))
        size = header["bytes"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise WireError(f"a header that is no JSON object with a size: {error!r}") from None
    if not isinstance(header, dict) or type(size) is not int or not 0 <= size <= max_payload:
        raise WireError(f"a payload of {size!r} bytes; at most {max_payload} are taken")
    return header, _receive(connection, room(header, size) or _new_room(size))


@contextlib.contextmanager
def cut_after(
    seconds: float, connection: socket.socket, expired: threading.Event
) -> Iterator[None]:
    """Shut a connection down that is still in use after so many seconds, and set `expired`.

    A socket's own time-out restarts with each piece that arrives, so one byte per second outlasts
    it.
    """

    def cut() -> None:
        expired.set()
        with contextlib.suppress(OSError):  # it ended meanwhile
            connection.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(max(0.0, seconds), cut)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _new_room(size: int) -> memoryview:
    # Not a bytearray, which would be filled with zeros first.
    return np.empty(size, np.uint8).data


def _receive(connection: socket.socket, room: memoryview) -> memoryview:
    seen, size = 0, len(room)
    while seen < size:
        count = connection.recv_into(room[seen:])
        if not count:
            raise WireError(f"the other side hung up after {seen} of {size} bytes")
        seen += count
    return room
