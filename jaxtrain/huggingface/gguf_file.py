"""GGUF files (llama.cpp): metadata, and tensors in place.

The format (github.com/ggml-org/ggml/blob/master/docs/gguf.md): magic, version, counts, metadata as
typed keys, the list of tensors with dims from the inside out, then aligned data. The header is
parsed here, within bounds, since files are untrusted and vocabularies large; the package `gguf`
decodes and encodes the blocks of quantized types.
"""

import dataclasses
import math
import os
import struct
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.huggingface.files import shorten
from jaxtrain.safe_io import POINTED, is_pointer

MAGIC = b"GGUF"
VERSIONS = (2, 3)
SCALARS = {
    **{0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?"},
    **{10: "<Q", 11: "<q", 12: "<d"},
}
STRING, ARRAY = 8, 9
PLAIN = {
    0: np.dtype(np.float32),
    1: np.dtype(np.float16),
    28: np.dtype(np.float64),
    30: np.dtype(ml_dtypes.bfloat16),
}
"""Types of tensors that are no blocks."""
MAX_HEADER = 2**28
MAX_ITEMS = 2**24
MAX_DIMS = 4


@dataclasses.dataclass(frozen=True)
class GgufTensor:
    """The location and type of a tensor in a file."""

    kind: int
    """Number of the type, as in gguf.GGMLQuantizationType."""
    shape: tuple[int, ...]
    """As numpy has it: the innermost dim last."""
    offset: int
    row_bytes: int
    """Of the innermost dim."""


class GgufFile:
    """A file's `metadata` by key, and its `tensors` by name. Raises UserError for another format, a
    damaged or truncated file."""

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        try:
            if is_pointer(self.path):
                raise UserError(f"{self.path} {POINTED}")
            with self.path.open("rb") as stream:
                self.metadata, listed, start = _Header(stream).read()
        except (struct.error, ValueError, OSError) as error:
            raise UserError(f"{self.path} is no readable GGUF file: {error}") from None
        sizes = {kind: (1, dtype.itemsize) for kind, dtype in PLAIN.items()}
        if any(kind not in PLAIN for _, _, kind, _ in listed):
            package = load_package(str(self.path))
            sizes |= {int(k): v for k, v in package.GGML_QUANT_SIZES.items() if k not in PLAIN}
        self.tensors: dict[str, GgufTensor] = {}
        end = self.path.stat().st_size
        for name, shape, kind, offset in listed:
            block, width = sizes.get(kind, (0, 0))
            if not block or not shape or shape[-1] % block:
                raise UserError(
                    f"{self.path}: tensor {shorten(name)} {shape} has type {kind}, which is unread"
                )
            tensor = GgufTensor(kind, shape, start + offset, shape[-1] // block * width)
            if name in self.tensors or tensor.offset + _nbytes(tensor) > end:
                raise UserError(
                    f"{self.path} is truncated or damaged at tensor {shorten(name)}; download it"
                    " again"
                )
            self.tensors[name] = tensor

    def fetch(self, name: str, index: int | None = None) -> np.ndarray:
        """Return a tensor, or the part [index] of one: float32 of a quantized one, else as is."""
        tensor = self.tensors[name]
        shape, offset = tensor.shape, tensor.offset
        if index is not None:
            shape = shape[1:]
            offset += index * math.prod(shape[:-1]) * tensor.row_bytes
        rows = math.prod(shape[:-1])
        raw = np.memmap(self.path, np.uint8, "r", offset, (rows, tensor.row_bytes))
        if tensor.kind in PLAIN:
            return np.asarray(raw).reshape(-1).view(PLAIN[tensor.kind]).reshape(shape)
        package = load_package(str(self.path))
        kind = package.GGMLQuantizationType(tensor.kind)
        try:
            return package.quants.dequantize(np.asarray(raw), kind).reshape(shape)
        except NotImplementedError:
            raise UserError(f"{self.path}: tensors of type {kind.name} are not read") from None


def _nbytes(tensor: GgufTensor) -> int:
    return math.prod(tensor.shape[:-1]) * tensor.row_bytes


def load_package(reason: str) -> ModuleType:
    """Return the package `gguf`. Raises UserError with the command that installs it."""
    try:
        import gguf
        import gguf.quants
    except ImportError:
        raise UserError(f"{reason} needs the package gguf: pip install 'jaxtrain[gguf]'") from None
    return gguf


class _Header:
    """A reader of the header, which counts what it reads."""

    def __init__(self, stream: BinaryIO):
        self.stream, self.left = stream, MAX_HEADER

    def read(self) -> tuple[dict[str, Any], list[tuple[str, tuple[int, ...], int, int]], int]:
        """Return (metadata, [(name, shape, kind, offset)], the start of the data)."""
        magic, version = self._take(4), self._scalar("<I")
        if magic != MAGIC or version not in VERSIONS:
            raise ValueError(f"it begins with {magic!r}, version {version}")
        tensors, keys = self._scalar("<Q"), self._scalar("<Q")
        if max(tensors, keys) > 2**20:
            raise ValueError(f"it counts {tensors} tensors and {keys} keys")
        metadata = {}
        for _ in range(keys):
            key = self._string()
            metadata[key] = self._value(self._scalar("<I"))
        listed = []
        for _ in range(tensors):
            name, dims = self._string(), self._scalar("<I")
            if dims > MAX_DIMS:
                raise ValueError(f"tensor {shorten(name)} has {dims} dims")
            shape = tuple(self._scalar("<Q") for _ in range(dims))[::-1]
            listed.append((name, shape, self._scalar("<I"), self._scalar("<Q")))
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 1 <= alignment <= 2**16:
            raise ValueError(f"general.alignment is {alignment}")
        place = self.stream.tell()
        return metadata, listed, place + -place % alignment

    def _take(self, count: int) -> bytes:
        self.left -= count
        if self.left < 0:
            raise ValueError(f"its header has more than {MAX_HEADER} bytes")
        raw = self.stream.read(count)
        if len(raw) < count:
            raise ValueError("it ends within the header")
        return raw

    def _scalar(self, code: str) -> Any:
        return struct.unpack(code, self._take(struct.calcsize(code)))[0]

    def _string(self) -> str:
        return self._take(self._scalar("<Q")).decode("utf-8", "replace")

    def _value(self, kind: int, inside: bool = False) -> Any:
        if kind in SCALARS:
            return self._scalar(SCALARS[kind])
        if kind == STRING:
            return self._string()
        if kind != ARRAY or inside:
            raise ValueError(f"a key has a value of type {kind}")
        inner, count = self._scalar("<I"), self._scalar("<Q")
        if count > MAX_ITEMS:
            raise ValueError(f"a list has {count} items")
        if inner in SCALARS:
            code = np.dtype(SCALARS[inner])
            return np.frombuffer(self._take(count * code.itemsize), code).tolist()
        return [self._value(inner, True) for _ in range(count)]
