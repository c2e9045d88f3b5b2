"""Streaming safetensors: folders of shards read by slice and written whole or not at all.

The format (huggingface.co/docs/safetensors): 8 bytes little-endian header length, a JSON header
{name: {dtype, shape, data_offsets}}, then the raw bytes. Both directions go through memory maps, so
the host holds only the slice in hand, whatever the size of the model.
"""

import dataclasses
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.hf.ops import Index, Piece

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
MAX_HEADER_BYTES = 100 * 10**6


@dataclasses.dataclass(frozen=True)
class Stored:
    """Where a tensor lies."""

    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int
    """Of its first byte in the file."""


class Folder:
    """The tensors of a folder: `tensors` by name, `fetch` for a part of one.

    single: the file that holds everything where there is no index.
    Raises UserError for a folder without safetensors, a shard that the index names and that is not
    there, a damaged header, a file shorter than its header says.
    """

    def __init__(self, folder: str | os.PathLike, single: str = SINGLE):
        self.path = Path(folder)
        self.tensors: dict[str, Stored] = {}
        index = self.path / INDEX
        if index.is_file():
            try:
                shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            except (ValueError, KeyError, AttributeError) as error:
                raise UserError(f"{index} is damaged: {error!r}; download it again") from error
        elif (self.path / single).is_file():
            shards = [single]
        else:
            raise UserError(
                f"{self.path} holds neither {single} nor {INDEX}; only safetensors are read: "
                "convert other weights with transformers' save_pretrained"
            )
        for shard in shards:
            if not (self.path / shard).is_file():
                raise UserError(f"{self.path / shard} is missing, but {INDEX} names it")
            self.tensors |= read_header(self.path / shard)

    def fetch(self, name: str, index: Index) -> np.ndarray:
        """tensors[name][index], still on disk until it is used."""
        stored = self.tensors[name]
        if 0 in stored.shape:
            return np.zeros(stored.shape, stored.dtype)[index]
        array = np.memmap(stored.file, stored.dtype, "r", stored.offset, stored.shape)
        return np.asarray(array)[index]


def read_header(file: Path) -> dict[str, Stored]:
    """The tensors of one file; UserError names the file and tensor that do not add up."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise UserError(
                f"{file} is truncated or no safetensors file: {size} bytes, header of {length}"
            )
        try:
            header = json.loads(stream.read(length))
        except ValueError as error:
            raise UserError(f"{file} has a damaged header: {error}") from error
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        start, stop = entry["data_offsets"]
        if entry["dtype"] not in DTYPES:
            raise UserError(
                f"{file}: tensor {name} has dtype {entry['dtype']}; supported: {sorted(DTYPES)}"
            )
        dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
        if stop - start != dtype.itemsize * int(np.prod(shape, dtype=np.int64)):
            raise UserError(f"{file}: tensor {name} {shape} does not fill its {stop - start} bytes")
        if 8 + length + stop > size:
            raise UserError(
                f"{file} is truncated: tensor {name} ends at byte {8 + length + stop}, the file "
                f"has {size}; download or copy it again"
            )
        tensors[name] = Stored(file, dtype, shape, 8 + length + start)
    return tensors


def write_folder(
    folder: str | os.PathLike,
    plan: Mapping[str, tuple[tuple[int, ...], np.dtype]],
    pieces: Iterable[Piece],
    max_shard_bytes: int = MAX_SHARD_BYTES,
    single: str = SINGLE,
) -> None:
    """Write tensors {name: (shape, dtype)} from pieces that cover them, cast to those dtypes.

    Shards and index are written under temporary names and renamed at the end, the index last; safe
    tensors of an earlier model in the folder are removed. single: the name of a lone shard.
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
    homes: dict[str, Stored] = {}
    for shard, path in zip(shards, temporary, strict=True):
        homes |= _reserve(path, {name: plan[name] for name in shard})
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


def _reserve(path: Path, plan: Mapping[str, tuple[tuple[int, ...], np.dtype]]) -> dict[str, Stored]:
    """Write the header and reserve the bytes; where each tensor of the file goes."""
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
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
        name: Stored(path, np.dtype(dtype), tuple(shape), 8 + len(text) + _start(header, name))
        for name, (shape, dtype) in plan.items()
    }


def _start(header: Mapping[str, dict], name: str) -> int:
    return header[name]["data_offsets"][0]


def _nbytes(shape: tuple[int, ...], dtype: np.dtype) -> int:
    return int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
