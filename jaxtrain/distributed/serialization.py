"""Plain values as bytes and back, without pickle: what is unpacked can only be data.

    b"JXP1", length of the header as u64
    the header as JSON: {"name", "value", "arrays": [[dtype, shape], ...]}
    the arrays' bytes one after the other, little-endian

A value consists of None, bool, int, float, str, lists, tuples, dicts, arrays, numpy scalars and
`Batch` with its `Images`. In the JSON each node but the first five kinds is a list that begins with
its kind's name.
"""

import json
import math
import struct
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from jaxtrain.batch import Batch, Images

MAGIC = b"JXP1"
START = struct.Struct("<4sQ")
MAX_HEADER_BYTES = 2**30
MAX_ARRAY_BYTES = 2**36
"""Limit for all arrays together; processes never share more."""
MAX_DIMS = 32
DTYPES = {
    name: np.dtype(name).newbyteorder("<")
    for name in (
        "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64"
    ).split()
} | {"bfloat16": np.dtype(ml_dtypes.bfloat16)}


class MalformedValueError(ValueError):
    """Received bytes that are no packed value."""


def pack(name: str, value: Any) -> list[memoryview]:
    """Return the parts to send, in order; TypeError for a value of another kind."""
    arrays: list[np.ndarray] = []

    def add_array(value: Any) -> int:
        array = np.asarray(value)
        if array.dtype.name not in DTYPES:
            raise TypeError(f"{name}: arrays of {array.dtype} cannot be sent to other processes")
        arrays.append(np.ascontiguousarray(array, DTYPES[array.dtype.name]).reshape(array.shape))
        return len(arrays) - 1

    def encode(node: Any) -> Any:
        match node:
            case np.generic():
                return ["scalar", add_array(node)]
            case None | bool() | int() | float() | str():
                return node
            case Batch():
                return ["batch", *map(encode, node)]
            case Images():
                return ["images", *map(encode, node)]
            case list():
                return ["list", *map(encode, node)]
            case tuple() if type(node) is tuple:
                return ["tuple", *map(encode, node)]
            case dict():
                return ["dict", *([encode(key), encode(item)] for key, item in node.items())]
        if hasattr(node, "__array__"):
            return ["array", add_array(node)]
        raise TypeError(f"{name}: a {type(node).__name__} cannot be sent to other processes")

    fields = {"name": name, "value": encode(value)}
    fields["arrays"] = [[array.dtype.name, list(array.shape)] for array in arrays]
    header = json.dumps(fields).encode()
    start = memoryview(START.pack(MAGIC, len(header)))
    raw = (array.reshape(-1).view(np.uint8).data for array in arrays if array.nbytes)
    return [start, memoryview(header), *raw]


def unpack(receive: Callable[[int], bytearray]) -> tuple[str, Any]:
    """Return (name, value) of the next packed value; receive(n): its next n bytes.

    The arrays are writable. Raises MalformedValueError before anything of an impossible size is
    received.
    """
    magic, length = START.unpack(receive(START.size))
    if magic != MAGIC or length > MAX_HEADER_BYTES:
        raise MalformedValueError("the bytes do not begin like a value from process 0")
    try:
        fields = json.loads(bytes(receive(length)))
        name, value = fields["name"], fields["value"]
        kinds = [_check_array(dtype, shape) for dtype, shape in fields["arrays"]]
        if sum(dtype.itemsize * math.prod(shape) for dtype, shape in kinds) > MAX_ARRAY_BYTES:
            raise MalformedValueError(f"{name}: arrays of more than {MAX_ARRAY_BYTES} bytes")
        arrays = []
        for dtype, shape in kinds:
            raw = receive(dtype.itemsize * math.prod(shape))
            arrays.append(np.frombuffer(raw, dtype).reshape(shape))
        return str(name), _decode(value, arrays)
    except MalformedValueError:
        raise
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise MalformedValueError(f"a value that cannot be read: {str(error)[:200]}") from None


def _check_array(dtype: Any, shape: Any) -> tuple[np.dtype, tuple[int, ...]]:
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise MalformedValueError(f"an array of dtype {str(dtype)[:40]!r}")
    # Not more dims than numpy has: the product of a million would take hours.
    sizes = shape if isinstance(shape, list) and len(shape) <= MAX_DIMS else [-1]
    if not all(type(n) is int and 0 <= n < 2**40 for n in sizes):
        raise MalformedValueError(f"an array of shape {str(shape)[:80]}")
    return DTYPES[dtype], tuple(sizes)


def _decode(node: Any, arrays: list[np.ndarray]) -> Any:
    if node is None or isinstance(node, bool | int | float | str):
        return node
    match node:
        case ["scalar", int(at)] if 0 <= at < len(arrays) and arrays[at].shape == ():
            return arrays[at][()]
        case ["array", int(at)] if 0 <= at < len(arrays):
            return arrays[at]
        case ["list", *items]:
            return [_decode(item, arrays) for item in items]
        case ["tuple", *items]:
            return tuple(_decode(item, arrays) for item in items)
        case ["dict", *items]:
            return {_decode(key, arrays): _decode(item, arrays) for key, item in items}
        case ["batch", *items] if len(items) == len(Batch._fields):
            return Batch(*(_decode(item, arrays) for item in items))
        case ["images", *items] if len(items) == len(Images._fields):
            return Images(*(_decode(item, arrays) for item in items))
    raise MalformedValueError("a node of no known kind")
