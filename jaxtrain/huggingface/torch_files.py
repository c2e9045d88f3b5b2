"""Files of torch.save (pytorch_model.bin) as tensors in place, without torch and without running
code.

Since version 1.6 such a file is a zip archive of uncompressed members: `data.pkl`, a pickle that
describes tensors, and `data/<key>`, the bytes of their storages. The pickle is read by an unpickler
that knows only what a state dict of plain tensors needs; the tensors stay on disk, memory-mapped.
"""

import collections
import io
import math
import pickle
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.huggingface.files import MAX_BYTES, find_inside, read_object, shorten
from jaxtrain.huggingface.safetensors import TensorLocation
from jaxtrain.safe_io import POINTED, is_pointer
from jaxtrain.text_safety import escape_control_chars

INDEX, SINGLE = "pytorch_model.bin.index.json", "pytorch_model.bin"
STORAGES = {
    "DoubleStorage": np.dtype(np.float64),
    "FloatStorage": np.dtype(np.float32),
    "HalfStorage": np.dtype(np.float16),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "LongStorage": np.dtype(np.int64),
    "IntStorage": np.dtype(np.int32),
    "ShortStorage": np.dtype(np.int16),
    "CharStorage": np.dtype(np.int8),
    "ByteStorage": np.dtype(np.uint8),
    "BoolStorage": np.dtype(np.bool_),
}
CONVERT = (
    'python -c "from transformers import AutoModelForCausalLM as M; M.from_pretrained({folder!r},'
    " dtype='auto').save_pretrained('CONVERTED')\""
)
"""The command that writes such a folder as safetensors (needs torch)."""
MEMBER_HEADER = 30
"""Bytes of a member's header in the file, before its name and extra field."""


class TorchStorage(NamedTuple):
    """The bytes of a storage in the file."""

    dtype: np.dtype
    offset: int
    size: int
    """In elements."""


class Described(NamedTuple):
    """A tensor as the pickle describes it."""

    storage: TorchStorage
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def read_torch_folder(folder: Path) -> Iterator[Mapping[str, TensorLocation]]:
    """Yield the tensors of each file of a folder. Raises UserError with the command that converts
    it for a file that is not read here."""
    index = folder / INDEX
    if not index.is_file():
        if not (folder / SINGLE).is_file():
            raise UserError(f"{folder} holds parts of {SINGLE}, but no {INDEX}; download it again")
        yield read_torch_file(folder / SINGLE)
        return
    homes = read_object(index, strict=True).get("weight_map")
    if not isinstance(homes, dict) or not all(isinstance(name, str) for name in homes.values()):
        raise UserError(f"{index} is damaged: its weight_map must name a file for each tensor")
    for name in sorted(set(homes.values())):
        yield read_torch_file(find_inside(folder, name, index))


def read_torch_file(file: Path) -> dict[str, TensorLocation]:
    """Return the tensors of one file. Raises UserError for another format or content."""
    if is_pointer(file):
        raise UserError(f"{file} {POINTED}")
    try:
        with zipfile.ZipFile(file) as archive, file.open("rb") as stream:
            state = _read_archive(archive, stream)
    except (KeyboardInterrupt, MemoryError):
        raise
    except Exception as error:  # pickle and zipfile raise nearly anything for damaged bytes
        raise _refuse(file, escape_control_chars(" ".join(str(error).split())[:200])) from None
    tensors = {}
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, Described):
            raise _refuse(file, f"{shorten(name)} is no tensor")
        tensors[name] = _locate(file, name, value)
    return tensors


def _read_archive(archive: zipfile.ZipFile, stream: io.BufferedReader) -> Mapping[str, Any]:
    members = {info.filename: info for info in archive.infolist()}
    listing = next(name for name in members if name.endswith("/data.pkl"))
    root = listing.removesuffix("data.pkl")
    if members[listing].file_size > MAX_BYTES:
        raise ValueError(f"its description has more than {MAX_BYTES} bytes")

    def locate(dtype: np.dtype, key: str, count: int) -> TorchStorage:
        info = members[f"{root}data/{key}"]
        if info.compress_type != zipfile.ZIP_STORED or count * dtype.itemsize > info.file_size:
            raise ValueError(f"the storage {key} is compressed or too short")
        stream.seek(info.header_offset)
        header = stream.read(MEMBER_HEADER)
        lengths = (int.from_bytes(header[first : first + 2], "little") for first in (26, 28))
        return TorchStorage(dtype, info.header_offset + MEMBER_HEADER + sum(lengths), count)

    state = _Unpickler(io.BytesIO(archive.read(listing)), locate).load()
    if isinstance(state, Mapping) and isinstance(state.get("state_dict"), Mapping):
        state = state["state_dict"]
    if not isinstance(state, Mapping):
        raise ValueError("it holds no state dict")
    return state


def _locate(file: Path, name: str, tensor: Described) -> TensorLocation:
    contiguous, step = [], 1
    for size in reversed(tensor.shape):
        contiguous.insert(0, step)
        step *= size
    same = all(
        size == 1 or stride == expected
        for size, stride, expected in zip(tensor.shape, tensor.strides, contiguous, strict=True)
    )
    count = math.prod(tensor.shape)
    if not same or tensor.start < 0 or tensor.start + count > tensor.storage.size:
        raise _refuse(file, f"{shorten(name)} is a view of another tensor")
    offset = tensor.storage.offset + tensor.start * tensor.storage.dtype.itemsize
    return TensorLocation(file, tensor.storage.dtype, tensor.shape, offset)


def _refuse(file: Path, reason: str) -> UserError:
    return UserError(
        f"{file} is not read: {reason or 'it is damaged'}; convert the folder:"
        f" {CONVERT.format(folder=str(file.parent))}"
    )


class _Unpickler(pickle.Unpickler):
    """An unpickler of state dicts: it builds dicts, lists, numbers and `Described`, nothing
    else."""

    def __init__(self, stream: io.BytesIO, locate: Any):
        super().__init__(stream, encoding="utf-8")
        self.locate = locate

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in STORAGES:
            return STORAGES[name]
        callables = {
            ("collections", "OrderedDict"): collections.OrderedDict,
            ("torch._utils", "_rebuild_tensor_v2"): _describe,
            ("torch._utils", "_rebuild_parameter"): _describe_parameter,
        }
        if (module, name) not in callables:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no plain weights need")
        return callables[module, name]

    def persistent_load(self, pid: Any) -> TorchStorage:
        kind, dtype, key, _, count = pid
        if kind != "storage" or not isinstance(dtype, np.dtype) or type(count) is not int:
            raise pickle.UnpicklingError("it refers to something else than a storage")
        return self.locate(dtype, str(key), count)


def _describe(storage: Any, start: Any, shape: Any, strides: Any, *_: Any) -> Described:
    sizes = (start, *shape, *strides)
    if not isinstance(storage, TorchStorage) or not all(type(n) is int and n >= 0 for n in sizes):
        raise pickle.UnpicklingError("a tensor has no storage or no shape")
    return Described(storage, start, tuple(shape), tuple(strides))


def _describe_parameter(tensor: Any, *_: Any) -> Any:
    return tensor
