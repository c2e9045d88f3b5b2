"""A plain value as bytes and back, without pickle: what is unpacked can only be data.

    b"JXP1", length of the header as u64
    the header as JSON: {"name", "value", "arrays": [[dtype, shape], ...]}
    the arrays' bytes one after the other, little-endian

The value is made of None, bool, int, float, str, lists, tuples, dicts, arrays, numpy's scalars and
`Batch`. In the JSON each node but the first five kinds is a list that begins with its kind's name.
"""

import json
import math
import struct
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from jaxtrain.batch import Batch

MAGIC = b"JXP1"
START = struct.Struct("<4sQ")
MAX_HEADER_BYTES = 2**30
MAX_ARRAY_BYTES = 2**36
"""Of all arrays together; more is not what processes tell each other."""
DTYPES = {
    name: np.dtype(name).newbyteorder("<")
    for name in (
        "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64"
    ).split()
} | {"bfloat16": np.dtype(ml_dtypes.bfloat16)}


class Garbled(ValueError):
    """Bytes that are no parcel."""


def pack(name: str, value: Any) -> list[memoryview]:
    """The parts to send, one after the other; TypeError for a value of another kind."""
    arrays: list[np.ndarray] = []

    def keep(array: Any) -> int:
        found = np.asarray(array)
        if found.dtype.name not in DTYPES:
            raise TypeError(f"{name}: arrays of {found.dtype} are not told to other processes")
        arrays.append(np.ascontiguousarray(found, DTYPES[found.dtype.name]).reshape(found.shape))
        return len(arrays) - 1

    def write(node: Any) -> Any:
        match node:
            case np.generic():
                return ["scalar", keep(node)]
            case None | bool() | int() | float() | str():
                return node
            case Batch():
                return ["batch", *map(write, node)]
            case list():
                return ["list", *map(write, node)]
            case tuple() if type(node) is tuple:
                return ["tuple", *map(write, node)]
            case dict():
                return ["dict", *([write(key), write(item)] for key, item in node.items())]
        if hasattr(node, "__array__"):
            return ["array", keep(node)]
        raise TypeError(f"{name}: a {type(node).__name__} is not told to other processes")

    told = {"name": name, "value": write(value)}
    told["arrays"] = [[array.dtype.name, list(array.shape)] for array in arrays]
    header = json.dumps(told).encode()
    start = memoryview(START.pack(MAGIC, len(header)))
    return [start, memoryview(header), *(_bytes_of(array) for array in arrays if array.nbytes)]


def unpack(receive: Callable[[int], bytearray]) -> tuple[str, Any]:
    """(name, value) of the next parcel; receive(n): its next n bytes.

    Arrays may be written to. Raises Garbled before anything of an impossible size is received.
    """
    magic, length = START.unpack(receive(START.size))
    if magic != MAGIC or length > MAX_HEADER_BYTES:
        raise Garbled("what came does not begin as a value that process 0 tells")
    try:
        told = json.loads(bytes(receive(length)))
        name, value = told["name"], told["value"]
        kinds = [_read_kind(dtype, shape) for dtype, shape in told["arrays"]]
        if sum(dtype.itemsize * math.prod(shape) for dtype, shape in kinds) > MAX_ARRAY_BYTES:
            raise Garbled(f"{name}: arrays of more than {MAX_ARRAY_BYTES} bytes")
        arrays = []
        for dtype, shape in kinds:
            raw = receive(dtype.itemsize * math.prod(shape))
            arrays.append(np.frombuffer(raw, dtype).reshape(shape))
        return str(name), _read(value, arrays)
    except Garbled:
        raise
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise Garbled(f"a value that cannot be read: {str(error)[:200]}") from None


def _bytes_of(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _read_kind(dtype: Any, shape: Any) -> tuple[np.dtype, tuple[int, ...]]:
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise Garbled(f"an array of dtype {str(dtype)[:40]!r}")
    if not isinstance(shape, list) or not all(type(n) is int and 0 <= n < 2**40 for n in shape):
        raise Garbled(f"an array of shape {str(shape)[:80]}")
    return DTYPES[dtype], tuple(shape)


def _read(node: Any, arrays: list[np.ndarray]) -> Any:
    if node is None or isinstance(node, bool | int | float | str):
        return node
    match node:
        case ["scalar", int(at)] if 0 <= at < len(arrays) and arrays[at].shape == ():
            return arrays[at][()]
        case ["array", int(at)] if 0 <= at < len(arrays):
            return arrays[at]
        case ["list", *items]:
            return [_read(item, arrays) for item in items]
        case ["tuple", *items]:
            return tuple(_read(item, arrays) for item in items)
        case ["dict", *items]:
            return {_read(key, arrays): _read(item, arrays) for key, item in items}
        case ["batch", *items] if len(items) == len(Batch._fields):
            return Batch(*(_read(item, arrays) for item in items))
    raise Garbled("a node of no known kind")
