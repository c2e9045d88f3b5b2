"""Quantize matrices of a Hugging Face folder, a part of a tensor at a time."""

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.huggingface import torchao
from jaxtrain.huggingface.compressed import (
    METHOD,
    NIBBLES,
    SCHEMES,
    TORCHAO,
    Scheme,
    encode,
    encoded_shapes,
    write_config,
)
from jaxtrain.huggingface.copy import copy_beside, is_float
from jaxtrain.huggingface.files import read_object, shorten, spell
from jaxtrain.huggingface.ops import TIED_COPY, SplitPiece, full_index
from jaxtrain.huggingface.packed import is_packed, open_folder
from jaxtrain.huggingface.safetensors import CODES, MAX_SHARD_BYTES, SafetensorsFolder, write_folder

PART_NUMBERS = 1 << 24
"""Of a matrix, so many are in memory at once, or one row."""


class Layout(NamedTuple):
    """Tensors of a quantized folder."""

    method: str
    """METHOD or TORCHAO."""
    embeddings: bool = False
    """True if the table of embeddings is quantized, too."""

    def name_tensors(self, name: str, parts: Mapping[str, Any]) -> dict[str, Any]:
        """Return {name of a tensor: value} for {suffix: value} of a matrix "X.weight"."""
        if self.method == TORCHAO:
            return torchao.name_tensors(name, parts)
        return {name + ending: value for ending, value in parts.items()}

    def shapes(self, scheme: Scheme, shape: tuple[int, ...], group: int) -> dict[str, Any]:
        """Return {suffix: (shape, dtype)} of the tensors of a matrix [out, in]."""
        shapes = encoded_shapes(scheme, shape, group)
        if self.method == TORCHAO:
            shapes["_scale"] = (shapes["_scale"][0], np.dtype(np.float32))
            if scheme.kind == "int":
                shapes["_zero_point"] = ((shape[0], 1), np.dtype(np.int8))
        return shapes


COMPRESSED = Layout(METHOD)


class QuantizeResult(NamedTuple):
    """Counts and sizes of a quantized folder."""

    matrices: int
    before: int
    """Bytes of all tensors."""
    after: int


def quantize_folder(
    base: Path,
    output: Path,
    scheme: str,
    group: int,
    names: Collection[str],
    max_shard_bytes: int = MAX_SHARD_BYTES,
    layout: Layout = COMPRESSED,
) -> QuantizeResult:
    """Write the model of `base` to `output` with the matrices `names` in a scheme of SCHEMES and
    all else byte by byte unchanged; with its tokenizer and configs.

    group: numbers of a row that share a scale, for a scheme with groups. Raises UserError before
    writing for a folder that is quantized already or matrices that do not fit, and while reading
    for numbers that are not finite.
    """
    config = read_object(base / "config.json")
    require_plain(config, base)
    files, how = open_folder(base), SCHEMES[scheme]
    check_matrices(files, names, group if how.grouped else None)
    plan: dict[str, tuple[tuple[int, ...], np.dtype]] = {}
    for name, stored in files.tensors.items():
        if name not in names:
            plan[name] = (stored.shape, stored.dtype)
            continue
        plan |= layout.name_tensors(name, layout.shapes(how, stored.shape, group))

    def pieces() -> Iterator[SplitPiece]:
        for name, stored in files.tensors.items():
            if name not in names:
                for part in cut(stored.shape):
                    yield SplitPiece(name, stored.shape, part, files.fetch(name, part))
                continue
            shapes = layout.shapes(how, stored.shape, group)
            for rows, columns in cut(stored.shape):
                matrix = files.fetch(name, (rows, columns))
                if not np.isfinite(matrix.astype(np.float32)).all():
                    raise UserError(f"{base}: {shorten(name)} holds NaN or infinite values")
                for part, array in layout.name_tensors(name, encode(how, matrix, group)).items():
                    shape = plan[part][0]
                    yield SplitPiece(part, shape, (rows, slice(0, shape[1])), array)
            constants = {}
            if "_shape" in shapes:
                constants["_shape"] = np.array(stored.shape, np.int64)
            if "_zero_point" in shapes:
                constants["_zero_point"] = np.zeros(shapes["_zero_point"][0], np.int8)
            for part, array in layout.name_tensors(name, constants).items():
                yield SplitPiece(part, array.shape, full_index(array.shape), array)

    is_torchao = layout.method == TORCHAO
    metadata = torchao.write_metadata(scheme, files.tensors, names) if is_torchao else None
    write_folder(output, plan, pieces(), max_shard_bytes, metadata=metadata)
    copy_beside(base, output)
    ignore = list_ignored(files, names)
    config["quantization_config"] = (
        torchao.write_config(scheme, ignore, embeddings=layout.embeddings)
        if is_torchao
        else write_config(how, group, ignore)
    )
    (output / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    sizes = [
        sum(
            int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
            for shape, dtype in tensors
        )
        for tensors in ([(s.shape, s.dtype) for s in files.tensors.values()], plan.values())
    ]
    return QuantizeResult(len(names), *sizes)


def require_plain(config: dict, base: Path) -> None:
    """Raise UserError for a folder that is quantized already."""
    packing = config.get("quantization_config")
    if packing is None:
        return
    method = packing.get("quant_method") if isinstance(packing, dict) else None
    advice = (
        f"jaxtrain export {base} --output PLAIN writes what they stand for"
        if is_packed(config)
        else "start from the folder that it was made of"
    )
    raise UserError(
        f"{base} is quantized already (quant_method {spell(str(method))}), and rounding twice loses"
        f" twice; {advice}"
    )


def check_matrices(files: SafetensorsFolder, names: Collection[str], group: int | None) -> None:
    """Raise UserError for tensors that no scheme can store: not a matrix of floats, or rows that
    groups do not divide."""
    for name in sorted(names):
        stored = files.tensors.get(name)
        if stored is None:
            raise UserError(f"{files.path} has no tensor {shorten(name)}; download it again")
        if len(stored.shape) != 2 or not is_float(stored.dtype):
            raise UserError(
                f"{files.path}: {shorten(name)} is {CODES[stored.dtype]} {stored.shape}; quantized"
                " are matrices of floats"
            )
        if group is not None and (stored.shape[1] % group or group % NIBBLES):
            raise UserError(
                f"--group {group} does not divide the {stored.shape[1]} inputs of {shorten(name)}"
                f" into groups of a multiple of {NIBBLES}; choose another, such as"
                f" {find_group(files, names)}"
            )


def find_group(files: SafetensorsFolder, names: Collection[str]) -> str:
    """Return the common group sizes that divide all matrices, as text."""
    fitting = [
        str(group)
        for group in (128, 64, 32, 16, 8)
        if all(files.tensors[name].shape[1] % group == 0 for name in names)
    ]
    return " or ".join(fitting) or "none: quantize to int8 or fp8"


def list_ignored(files: SafetensorsFolder, names: Collection[str]) -> list[str]:
    """List the modules whose matrices stay as they are, with a head even if it is tied."""
    plain = {
        name.removesuffix(".weight")
        for name, stored in files.tensors.items()
        if name not in names and name.endswith(".weight") and len(stored.shape) > 1
    }
    head = set() if TIED_COPY in names else {TIED_COPY.removesuffix(".weight")}
    return sorted(plain | head)


def cut(shape: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
    """Indices of parts that cover an array, by its first dim."""
    if not shape:
        yield ()
        return
    per_row = max(1, int(np.prod(shape[1:], dtype=np.int64)))
    step = max(1, PART_NUMBERS // per_row)
    for first in range(0, shape[0], step):
        yield (slice(first, min(shape[0], first + step)), *full_index(shape[1:]))
