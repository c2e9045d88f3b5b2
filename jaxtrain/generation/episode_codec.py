"""Groups as JSON and back, bit by bit: what a checkpoint keeps of the replay buffer.

A dataclass of episodes.py or engine.py becomes {"kind": "Episode", ...}; a list of numbers of one
type becomes {"dtype", "data"}, zlib and base64 of its bytes: about 10 bytes for a token of an
episode. Fields that are not read again after training are left out: texts and measurements. Between
processes all fields are sent, and numbers as arrays: {"array"}.
"""

import base64
import dataclasses
import zlib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.data.packing import tree
from jaxtrain.generation import engine, episodes

LEFT_OUT = ("completion", "prompt", "metrics", "row", "advantages", "totals")
NUMBERS = {bool: "|b1", int: "<i8", float: "<f8"}


def narrow(array: np.ndarray) -> np.ndarray:
    """Return the numbers in half the bytes, if these hold them exactly."""
    with np.errstate(over="ignore"):
        narrowed = array.astype({"i": "<i4", "f": "<f4"}.get(array.dtype.kind, array.dtype))
    return narrowed if np.array_equal(narrowed.astype(array.dtype), array) else array


def as_text(array: np.ndarray) -> dict[str, Any]:
    """Return one-dimensional numbers for JSON."""
    array = narrow(array)
    data = base64.b64encode(zlib.compress(array.tobytes(), 1)).decode()
    return {"dtype": array.dtype.str, "data": data}


def as_array(array: np.ndarray) -> dict[str, Any]:
    """Return one-dimensional numbers for another process."""
    return {"array": narrow(array)}


def pack(
    value: Any,
    left_out: Collection[str] = LEFT_OUT,
    numbers: Callable[[np.ndarray], dict[str, Any]] = as_text,
) -> Any:
    """Return something JSON-able for a dataclass, a list, a dict with texts as keys, or a scalar,
    for `unpack`. numbers: packs an array."""

    def go(value: Any) -> Any:
        if dataclasses.is_dataclass(value):
            names = [field.name for field in dataclasses.fields(value)]
            fields = {name: go(getattr(value, name)) for name in names if name not in left_out}
            return {"kind": type(value).__name__, **fields}
        if isinstance(value, np.ndarray):
            return {**numbers(value.reshape(-1)), "shape": list(value.shape)}
        if isinstance(value, list | tuple):
            kinds = {type(item) for item in value}
            dtype = NUMBERS.get(*kinds) if len(kinds) == 1 and isinstance(value, list) else None
            if dtype is not None:
                try:
                    return numbers(np.array(value, dtype))
                except OverflowError:  # an integer beyond 64 bits, in a row of the data
                    pass
            return {"kind": type(value).__name__, "items": [go(item) for item in value]}
        if isinstance(value, dict):
            return {"kind": "dict", "items": {name: go(item) for name, item in value.items()}}
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, Path):
            return {"kind": "path", "text": str(value)}
        if isinstance(value, bytes):
            return {"kind": "bytes", "text": base64.b64encode(value).decode()}
        return value

    return go(value)


def unpack(value: Any) -> Any:
    """Return what `pack` packed, without what it left out."""
    if not isinstance(value, dict):
        return value
    if "array" in value or "dtype" in value:
        array = value.get("array")
        if array is None:
            data = zlib.decompress(base64.b64decode(value["data"]))
            array = np.frombuffer(data, value["dtype"])
        return array.reshape(value["shape"]).copy() if "shape" in value else array.tolist()
    match value["kind"]:
        case "list":
            return [unpack(item) for item in value["items"]]
        case "tuple":
            return tuple(unpack(item) for item in value["items"])
        case "dict":
            return {name: unpack(item) for name, item in value["items"].items()}
        case "path":
            return Path(value["text"])
        case "bytes":
            return base64.b64decode(value["text"])
    kind = next(
        getattr(module, value["kind"])
        for module in (episodes, engine, tree)
        if hasattr(module, value["kind"])
    )
    fields = {name: unpack(item) for name, item in value.items() if name != "kind"}
    return kind(**{"row": {}, **fields} if kind is episodes.Group else fields)
