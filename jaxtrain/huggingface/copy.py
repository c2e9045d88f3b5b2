"""Copy a Hugging Face folder tensor by tensor: cast, resharded, corrected.

Works by tensor names alone, so the host never holds more than one tensor, whatever the size or
family of the model.
"""

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.huggingface.files import check_inside, read_object
from jaxtrain.huggingface.ops import SplitPiece, full_index
from jaxtrain.huggingface.packed import is_packed, open_folder, without_packing
from jaxtrain.huggingface.remote_code import write_modules
from jaxtrain.huggingface.safetensors import CODES, MAX_SHARD_BYTES, SHARD, write_folder


@dataclasses.dataclass(frozen=True)
class TensorChanges:
    """Differences of a copy's tensors from the folder's."""

    change: Callable[[str, np.ndarray, int | None], np.ndarray] = lambda name, array, index: array
    """(name, array, None) -> the array to write; a tensor of three dims is passed one matrix at a
    time, with its index."""
    shapes: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    """Of tensors that `change` makes larger."""
    copies: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """{further tensor: the tensor of the folder that it starts from}."""


def copy_folder(
    base: Path,
    output: Path,
    dtype: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    changes: TensorChanges | None = None,
    keys: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Write the model of `base` to the folder `output`, with its tokenizer and configs.

    dtype: for all floating-point tensors, by default unchanged; supported quantized tensors
    (huggingface/packed.py) are written dequantized. A shard holds at most `max_shard_bytes`, or one
    tensor. keys: new values of config.json. Raises UserError for an invalid folder, and for a cast
    of a quantized model.
    """
    changes = changes or TensorChanges()
    files, copies = open_folder(base), changes.copies
    config = read_object(base / "config.json") if (base / "config.json").is_file() else None
    packed = config is not None and is_packed(config)
    if config is not None and packed:
        config = without_packing(config)
    if dtype and config and config.get("quantization_config") is not None:
        raise UserError(
            f"{base / 'config.json'} has a quantization_config: its tensors are codes, which no"
            " cast makes weights of; leave out the dtype"
        )
    tensors = files.tensors | {name: files.tensors[source] for name, source in copies.items()}
    plan = {
        name: (
            changes.shapes.get(name, stored.shape),
            np.dtype(dtype) if dtype and is_float(stored.dtype) else stored.dtype,
        )
        for name, stored in tensors.items()
    }

    def pieces() -> Iterator[SplitPiece]:
        for name, stored in tensors.items():
            source = copies.get(name, name)
            if len(stored.shape) != 3:
                array = changes.change(name, files.fetch(source, full_index(stored.shape)), None)
                yield SplitPiece(name, array.shape, full_index(array.shape), array)
                continue
            for index in range(stored.shape[0]):
                matrix_index = (slice(index, index + 1), *full_index(stored.shape[1:]))
                array = changes.change(name, files.fetch(source, matrix_index)[0], index)
                yield SplitPiece(name, stored.shape, matrix_index, array[None])

    write_folder(output, plan, pieces(), max_shard_bytes)
    copy_beside(base, output)
    write_modules(config or {}, output)
    if dtype and config is not None:
        config = {**config, "torch_dtype": str(np.dtype(dtype))}
        config.pop("dtype", None)
    if config is not None and keys:
        config = with_keys(config, keys)
    if config is not None and (dtype or packed or keys):
        text = json.dumps(config, indent=2, sort_keys=True) + "\n"
        (output / "config.json").write_text(text)


def with_keys(config: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json with new values, placed in text_config if they are there."""
    inner = config.get("text_config")
    if not isinstance(inner, dict):
        return {**config, **keys}
    outer = {key: value for key, value in keys.items() if key in config or key not in inner}
    below = {key: value for key, value in keys.items() if key in inner}
    return {**config, **outer, "text_config": {**inner, **below}}


def copy_beside(base: Path, output: Path) -> None:
    """Copy the files next to a folder's weights: configs, tokenizer, template."""
    for file in base.iterdir():
        if file.name == "hf_quant_config.json":  # of modelopt: what is written is plain
            continue
        if file.is_file() and not SHARD.fullmatch(file.name) and not file.name.startswith("."):
            if file.suffix in (".json", ".jinja", ".txt", ".model"):
                check_inside(base, file)  # the folder may be given to others
                shutil.copyfile(file, output / file.name)


def is_float(dtype: np.dtype) -> bool:
    """Return True for the dtype of plain floating-point weights."""
    return CODES[dtype] in ("F64", "F32", "F16", "BF16")
