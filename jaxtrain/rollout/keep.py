"""Groups as JSON and back, bit by bit: what a checkpoint keeps of the replay buffer.

A dataclass of rollout.types becomes {"kind": "Episode", ...}; a list of numbers of one type becomes
{"dtype", "data"}, zlib and base64 of its bytes: about 10 bytes for a token of an episode. Left out
is what nobody reads again of an answer that was trained: its texts and what was measured of it.
"""

import base64
import dataclasses
import zlib
from typing import Any

import numpy as np

from jaxtrain.rollout import types

LEFT_OUT = ("completion", "prompt", "metrics", "row", "advantages", "totals")
NUMBERS = {bool: "|b1", int: "<i8", float: "<f8"}


def pack(value: Any) -> Any:
    """Something JSON-able of a dataclass, a list, a dict with texts as keys, or a scalar."""
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        kept = {name: pack(getattr(value, name)) for name in names if name not in LEFT_OUT}
        return {"kind": type(value).__name__, **kept}
    if isinstance(value, np.ndarray):
        return {**pack_numbers(value.reshape(-1)), "shape": list(value.shape)}
    if isinstance(value, list | tuple):
        kinds = {type(item) for item in value}
        if len(kinds) == 1 and (dtype := NUMBERS.get(*kinds)):
            return pack_numbers(np.array(value, dtype))
        return {"kind": type(value).__name__, "items": [pack(item) for item in value]}
    if isinstance(value, dict):
        return {"kind": "dict", "items": {name: pack(item) for name, item in value.items()}}
    if isinstance(value, np.generic):
        return value.item()
    return value


def pack_numbers(array: np.ndarray) -> dict[str, str]:
    """One-dimensional numbers, in half the bytes where these hold them exactly."""
    with np.errstate(over="ignore"):
        narrow = array.astype({"i": "<i4", "f": "<f4"}.get(array.dtype.kind, array.dtype))
    if np.array_equal(narrow.astype(array.dtype), array):
        array = narrow
    data = base64.b64encode(zlib.compress(array.tobytes(), 1)).decode()
    return {"dtype": array.dtype.str, "data": data}


def unpack(value: Any) -> Any:
    """What `pack` was given, but for what it left out."""
    if not isinstance(value, dict):
        return value
    if "dtype" in value:
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
    made = getattr(types, value["kind"])
    found = {name: unpack(item) for name, item in value.items() if name != "kind"}
    return made(**{"row": {}, **found} if made is types.Group else found)
