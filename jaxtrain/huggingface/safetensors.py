"""Streaming safetensors: folders of shards read by slice and written whole or not at all.

The format (huggingface.co/docs/safetensors): 8 bytes little-endian header length, a JSON header
{name: {dtype, shape, data_offsets}}, then the raw bytes. Both directions go through memory maps, so
the host holds only the slice in hand, whatever the size of the model.
"""

import dataclasses
import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.huggingface.files import (
    MAX_BYTES,
    describe,
    find_inside,
    parse_object,
    read_object,
    shorten,
)
from jaxtrain.huggingface.ops import Index, SplitPiece
from jaxtrain.safe_io import POINTED, POINTER

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SHARD = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
MAX_SHARD_BYTES = 5 * 10**9
MAX_HEADER_BYTES = MAX_BYTES
MAX_DIMS = 16


@dataclasses.dataclass(frozen=True)
class TensorLocation:
    """The location of a tensor in a file."""

    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int
    """Of its first byte in the file."""

    def read(self, index: Index) -> np.ndarray:
        """Return a part of the tensor, memory-mapped."""
        if 0 in self.shape:
            return np.zeros(self.shape, self.dtype)[index]
        array = np.memmap(self.file, self.dtype, "r", self.offset, self.shape)
        return np.asarray(array)[index]


class SafetensorsFolder:
    """The tensors of a folder: `tensors` by name, `fetch` for a part of one.

    single: the file that holds everything if there is no index. Raises UserError for a folder
    without safetensors, a wrong index or header, a shard that is missing or outside of the folder,
    a truncated file.
    """

    def __init__(self, folder: str | os.PathLike, single: str = SINGLE):
        self.path = Path(folder)
        self.tensors: dict[str, TensorLocation] = {}
        index = self.path / INDEX
        if index.is_file():
            homes = read_index(index)
            for shard in sorted(set(homes.values())):
                self._add(read_header(find_inside(self.path, shard, index)))
            for name, shard in homes.items():
                stored = self.tensors.get(name)
                if stored is None or stored.file != self.path / shard:
                    where = "nowhere" if stored is None else f"in {stored.file.name}"
                    raise UserError(
                        f"{index}: weight_map says that {shorten(name)} is in {shard}, but it is"
                        f" {where}; download the folder again"
                    )
        elif (self.path / single).is_file():
            self._add(read_header(self.path / single))
        elif single == SINGLE and (shards := find_shards(self.path)):
            for shard in shards:
                self._add(read_header(shard))
        else:
            for tensors in self._list_others():
                self._add(tensors)
        if not self.tensors:
            raise UserError(f"{self.path} holds no tensors; download the folder again")

    def _list_others(self) -> Iterable[Mapping[str, TensorLocation]]:
        """Return the tensors of files of another format. Raises UserError if there are none."""
        raise UserError(
            f"{self.path} holds neither weights in safetensors nor pytorch_model.bin; convert"
            " others with transformers' save_pretrained"
        )

    def _add(self, tensors: Mapping[str, TensorLocation]) -> None:
        for name, stored in tensors.items():
            if name in self.tensors:
                raise UserError(
                    f"{stored.file}: tensor {shorten(name)} is in {self.tensors[name].file.name},"
                    " too; download the folder again"
                )
            self.tensors[name] = stored

    def fetch(self, name: str, index: Index) -> np.ndarray:
        """Return tensors[name][index], memory-mapped."""
        return self.tensors[name].read(index)


def find_shards(folder: Path) -> list[Path]:
    """Return the shards of a folder without an index, by the number in their names; [] without any.
    Raises UserError if one is missing."""
    names = {file.name for file in folder.glob("model-*.safetensors") if SHARD.fullmatch(file.name)}
    if not names:
        return []
    count = int(max(names).removesuffix(".safetensors")[-5:])
    expected = [f"model-{number + 1:05d}-of-{count:05d}.safetensors" for number in range(count)]
    if odd := sorted(names.symmetric_difference(expected)):
        raise UserError(
            f"{folder} has no {INDEX}, and its shards are not those of one model of {count}:"
            f" {odd[0]} {'is of another one' if odd[0] in names else 'is missing'}"
        )
    return [folder / name for name in expected]


def read_index(index: Path) -> dict[str, str]:
    """Return {tensor: file name} of an index. Raises UserError for other content."""
    homes = read_object(index, strict=True).get("weight_map")
    if not isinstance(homes, dict) or not all(isinstance(file, str) for file in homes.values()):
        raise UserError(
            f"{index} is damaged: its weight_map must be an object with a file name for each"
            f" tensor, found {describe(homes)}; download it again"
        )
    return homes


def read_header(file: Path) -> dict[str, TensorLocation]:
    """Return the tensors of one file. Raises UserError naming the file and the inconsistent
    tensor."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        begins = stream.read(8)
        length = int.from_bytes(begins, "little")
        if begins == POINTER[:8]:
            raise UserError(f"{file} {POINTED}")
        if size < 8 or length > size - 8:
            raise UserError(
                f"{file} is truncated or no safetensors file: {size} bytes, header of {length}"
            )
        if length > MAX_HEADER_BYTES:
            raise UserError(
                f"{file}: a header of {length} bytes; at most {MAX_HEADER_BYTES} are read"
            )
        raw = stream.read(length)
    header = parse_object(raw, f"the header of {file} (a damaged header)", strict=True)
    header.pop("__metadata__", None)
    begin = 8 + length
    tensors = {}
    spans = []
    for name, entry in header.items():
        dtype, shape, start, stop = _read_entry(file, name, entry)
        if begin + stop > size:
            raise UserError(
                f"{file} is truncated: tensor {shorten(name)} ends at byte {begin + stop}, the file"
                f" has {size}; download or copy it again"
            )
        tensors[name] = TensorLocation(file, dtype, shape, begin + start)
        spans.append((start, stop, name))
    end, last = 0, None
    for start, stop, name in sorted(spans):
        if start < end:
            raise UserError(
                f"{file}: tensors {shorten(last)} and {shorten(name)} overlap; the header is"
                " damaged, download the file again"
            )
        end, last = stop, name
    return tensors


def _read_entry(file: Path, name: str, entry: Any) -> tuple[np.dtype, tuple[int, ...], int, int]:
    """Return (dtype, shape, first byte, byte behind the last) of one tensor of a header."""
    source = f"{file}: tensor {shorten(name)}"
    if not isinstance(entry, dict):
        raise UserError(f"{source} is {describe(entry)} in the header; the file is damaged")
    code = entry.get("dtype")
    if not isinstance(code, str) or code not in DTYPES:
        raise UserError(f"{source} has dtype {shorten(code)}; supported: {sorted(DTYPES)}")
    shape, offsets = _read_sizes(entry.get("shape")), _read_sizes(entry.get("data_offsets"))
    if shape is None or len(shape) > MAX_DIMS:
        raise UserError(f"{source} has shape {shorten(entry.get('shape'))}; the header is damaged")
    if offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise UserError(
            f"{source} has data_offsets {shorten(entry.get('data_offsets'))}; the header is damaged"
        )
    start, stop = offsets
    dtype = DTYPES[code]
    if stop - start != dtype.itemsize * math.prod(shape):
        raise UserError(
            f"{source} {shorten(list(shape))} {code} does not fill its {stop - start} bytes; the"
            " header is damaged"
        )
    return dtype, shape, start, stop


def _read_sizes(value: Any) -> tuple[int, ...] | None:
    if isinstance(value, list) and all(type(n) is int and 0 <= n < 2**63 for n in value):
        return tuple(value)
    return None


class RoundingLoss:
    """Rounding of tensors to the dtypes that they are stored in, beside how far training moved
    them: sums of squares over all that was changed."""

    NOTED = 0.05
    """Share of the changes that rounding may take before people are warned."""

    def __init__(self) -> None:
        self.rounding = self.change = 0.0

    def add(self, wide: np.ndarray, dtype: Any, before: np.ndarray) -> None:
        """Count a tensor that is stored as `dtype`. before: what it was, perhaps of fewer rows."""
        wide = wide.astype(np.float32)
        stored = wide.astype(dtype).astype(np.float32)
        self.rounding += float(np.square(stored - wide).sum(dtype=np.float64))
        rows = slice(min(len(wide), len(before))) if wide.ndim else ()
        delta = wide[rows] - before[rows].astype(np.float32)
        self.change += float(np.square(delta).sum(dtype=np.float64))

    @property
    def share(self) -> float:
        """Ratio of the two root mean squares; 0 if nothing was changed."""
        return (self.rounding / self.change) ** 0.5 if self.change else 0.0


def write_folder(
    folder: str | os.PathLike,
    plan: Mapping[str, tuple[tuple[int, ...], np.dtype]],
    pieces: Iterable[SplitPiece],
    max_shard_bytes: int = MAX_SHARD_BYTES,
    single: str = SINGLE,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write tensors {name: (shape, dtype)} from pieces that cover them, cast to those dtypes.

    Shards and index are written under temporary names and renamed at the end, the index last; safe
    tensors of an earlier model in the folder are removed. single: the name of a lone shard.
    metadata: of each file's header, beside its format.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    shards = _assign(plan, max_shard_bytes)
    count = len(shards)
    names = [
        single if count == 1 else f"model-{i:05d}-of-{count:05d}.safetensors"
        for i in range(1, count + 1)
    ]
    temporary = [folder / f".{name}.unfinished" for name in names]
    homes: dict[str, TensorLocation] = {}
    for shard, path in zip(shards, temporary, strict=True):
        homes |= _reserve(path, {name: plan[name] for name in shard}, metadata or {})
    missing = {name: int(np.prod(shape, dtype=np.int64)) for name, (shape, _) in plan.items()}
    for piece in pieces:
        home = homes[piece.name]
        assert home.shape == piece.shape, f"{piece.name}: {piece.shape} is not {home.shape}"
        if piece.array.size:
            out = np.memmap(home.file, home.dtype, "r+", home.offset, home.shape)
            out[piece.index] = piece.array.astype(home.dtype)
        missing[piece.name] -= piece.array.size
    assert not any(missing.values()), f"unwritten parts: {[n for n, m in missing.items() if m]}"
    for old in folder.iterdir():
        if SHARD.fullmatch(old.name) and old.name not in names:
            old.unlink()
    for path, name in zip(temporary, names, strict=True):
        with path.open("rb") as stream:
            os.fsync(stream.fileno())
        os.replace(path, folder / name)
    if count > 1:
        total = sum(_nbytes(*spec) for spec in plan.values())
        weight_map = {n: file for shard, file in zip(shards, names, strict=True) for n in shard}
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
        (folder / f".{INDEX}.unfinished").write_text(text + "\n")
        os.replace(folder / f".{INDEX}.unfinished", folder / INDEX)


def _assign(plan: Mapping[str, tuple], max_shard_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    filled = 0
    for name, spec in plan.items():
        size = _nbytes(*spec)
        if shards[-1] and filled + size > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _reserve(
    path: Path, plan: Mapping[str, tuple[tuple[int, ...], np.dtype]], metadata: Mapping[str, str]
) -> dict[str, TensorLocation]:
    """Write the header and reserve the bytes; return the location of each tensor of the file."""
    header: dict[str, dict] = {"__metadata__": {"format": "pt", **metadata}}
    end = 0
    for name, (shape, dtype) in plan.items():
        start, end = end, end + _nbytes(shape, dtype)
        header[name] = {
            "dtype": CODES[np.dtype(dtype)],
            "shape": list(shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + end)
    return {
        name: TensorLocation(
            path, np.dtype(dtype), tuple(shape), 8 + len(text) + _start(header, name)
        )
        for name, (shape, dtype) in plan.items()
    }


def _start(header: Mapping[str, dict], name: str) -> int:
    return header[name]["data_offsets"][0]


def _nbytes(shape: tuple[int, ...], dtype: np.dtype) -> int:
    return int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
