"""Folders that hold weights in few bits, seen as the tensors that they stand for.

MXFP4 (OCP Microscaling 1.0; gpt-oss): `X_blocks` uint8 [..., out, in / 32, 16] and `X_scales` uint8
[..., out, in / 32] stand for `X` [..., in, out] in bfloat16, which holds every such number exactly.
A byte is two codes of E2M1, the first in its low half; a scale is a power of two.

FP8 in blocks (DeepSeek-V3: arXiv:2412.19437, section 3.3.2): `X` float8_e4m3fn [..., out, in] is
to be multiplied with `X_scale_inv` [..., out / 128, in / 128], rounded up, each number for a block
of 128 x 128; or with one number for the whole matrix.

What compressed-tensors, NVIDIA's modelopt and `jaxtrain quantize` write: huggingface/compressed.py.

Only what is fetched is decoded, and the parts of a tensor may lie in different shards. Names are
those of transformers' causal models, whatever wrapped the model that was saved.
"""

import hashlib
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.huggingface.compressed import (
    BFLOAT16,
    FLOAT8,
    METHOD,
    MODELOPT,
    PAIRS,
    TORCHAO,
    check_config,
    check_modelopt,
    check_torchao,
    find_compressed,
)
from jaxtrain.huggingface.files import describe, shorten, spell
from jaxtrain.huggingface.ops import Fetch, Index, full_index
from jaxtrain.huggingface.safetensors import SafetensorsFolder, TensorLocation

SCALES = "_scale_inv"
METHODS = ("mxfp4", "fp8", METHOD, MODELOPT, TORCHAO)
"""Values of quantization_config.quant_method that are read."""
MXFP4_BLOCK = 32
FP8_BLOCK = 128
E4M3 = np.arange(256, dtype=np.uint8).view(FLOAT8).astype(np.float32)
"""float32 [256]: what each byte stands for."""
PAIR_BITS = PAIRS.astype(BFLOAT16).view(np.uint32)[:, 0]
"""The same in bfloat16, as one number."""
WRAPPED = re.compile(
    r"^(module\.)+|(?:(?<=\.)|^)(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)
"""What torch.compile, DDP, FSDP and checkpointing put into names."""
BUFFER = re.compile(
    r"(^|\.)(rotary_emb\.(\w*inv_freq|\w*(cos|sin)_cached)|causal_mask|masked_bias|position_ids)$"
)
"""Buffers of older transformers, which are no weights."""
MASK = re.compile(r"(^|\.)(self_attn|attn|attention)\.(bias|mask)$")
"""Names of causal masks [1, 1, T, T], and of biases [out]."""
OF_ACTIVATIONS = re.compile(r"(input_scale|input_global_scale|activation_scale|\.[qkv]_scale)$")
"""Names of scales that concern activations and caches of a server alone."""
MIDDLE_SCALES = (2, 252)
"""Between these, both included, a scale moves no exponent of bfloat16 out of its range."""


class PackedTensor(Protocol):
    """A tensor that is decoded from others when it is read."""

    parts: tuple[str, ...]
    """The stored tensors."""
    shape: tuple[int, ...]

    def read(self, fetch: Fetch, index: Index) -> np.ndarray:
        """Return [index] in bfloat16; slices may have steps. fetch: reads stored tensors."""
        ...


class MXFP4Tensor:
    """A tensor stored in MXFP4."""

    def __init__(self, name: str, blocks: TensorLocation, scales: TensorLocation):
        self.parts = (f"{name}_blocks", f"{name}_scales")
        *lead, num_out, count, width = blocks.shape
        if width * 2 != MXFP4_BLOCK or scales.shape != blocks.shape[:-1]:
            raise UserError(
                f"{blocks.file}: {shorten(self.parts[0])} {blocks.shape} and {self.parts[1]}"
                f" {scales.shape} are no MXFP4 weights: blocks are [..., out, in / 32, 16], scales"
                " [..., out, in / 32]"
            )
        self.shape = (*lead, count * MXFP4_BLOCK, num_out)
        self.stored = (blocks, scales)

    def view(self) -> tuple[np.ndarray, np.ndarray]:
        """Return uint8 [..., out, in / 2] and [..., out, in / 32] as stored, still on disk."""
        blocks, scales = (stored.read(full_index(stored.shape)) for stored in self.stored)
        return blocks.reshape(*scales.shape[:-1], -1), scales

    def read(self, fetch, index):
        *lead, inputs, outputs = index
        first, last = inputs.start // MXFP4_BLOCK, -(-inputs.stop // MXFP4_BLOCK)
        stored = (*lead, outputs, slice(first, last))
        blocks, scales = fetch(self.parts[0], (*stored, slice(0, 16))), fetch(self.parts[1], stored)
        inside = slice(
            inputs.start - first * MXFP4_BLOCK, inputs.stop - first * MXFP4_BLOCK, inputs.step
        )
        values = np.empty((*scales.shape[:-1], MXFP4_BLOCK * scales.shape[-1]), BFLOAT16)
        for matrix in np.ndindex(scales.shape[:-2]):  # a matrix at a time: few are wide at once
            values[matrix] = decode_mxfp4(blocks[matrix], scales[matrix])
        return values[..., inside].swapaxes(-1, -2)


def decode_mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Decode uint8 [out, in / 32, 16] and [out, in / 32] to [out, in] in bfloat16 or float32."""
    low, high = MIDDLE_SCALES
    if scales.size and low <= scales.min() and scales.max() <= high:  # ten times as fast
        bits = PAIR_BITS[blocks].view(np.uint16).reshape(*scales.shape, MXFP4_BLOCK)
        moved = ((scales.astype(np.int16) - 127) << 7).view(np.uint16)
        bits += moved[..., None] * ((bits & 0x7FFF) != 0)  # 0 has no exponent
        return bits.view(BFLOAT16).reshape(len(scales), -1)
    values = PAIRS[blocks].reshape(*scales.shape, MXFP4_BLOCK)
    with np.errstate(over="ignore"):  # infinite, as which it is reported
        values *= np.ldexp(np.float32(1), scales.astype(np.int32) - 127)[..., None]
    return values.reshape(len(scales), -1)


class FP8:
    """A tensor stored in FP8 with a scale per block, or one for each matrix."""

    def __init__(self, name: str, codes: TensorLocation, scales: TensorLocation):
        self.parts = (name, f"{name}{SCALES}")
        *lead, num_out, num_in = codes.shape
        expected = (*lead, -(-num_out // FP8_BLOCK), -(-num_in // FP8_BLOCK))
        self.whole = scales.shape in ((), (1,)) or (lead and scales.shape == (*lead, 1, 1))
        self.scales = scales.shape
        if not self.whole and scales.shape != expected:
            raise UserError(
                f"{scales.file}: {shorten(self.parts[1])} {scales.shape} does not fit weights"
                f" {codes.shape} in FP8: {expected}, one scale for each {FP8_BLOCK} x {FP8_BLOCK}"
            )
        self.shape = codes.shape

    def read(self, fetch, index):
        *lead, rows, columns = index
        if self.whole:
            codes = E4M3[fetch(self.parts[0], index).view(np.uint8)]
            where = (*lead, *full_index((1, 1))) if len(self.scales) > 1 else None
            scales = fetch(self.parts[1], where or full_index(self.scales))
            return (codes * scales.astype(np.float32)).astype(BFLOAT16)
        places = [np.arange(dim.start, dim.stop, dim.step) // FP8_BLOCK for dim in (rows, columns)]
        blocks = [
            slice(dim.start // FP8_BLOCK, -(-dim.stop // FP8_BLOCK)) for dim in (rows, columns)
        ]
        codes, scales = fetch(self.parts[0], index), fetch(self.parts[1], (*lead, *blocks))
        own_rows, own_columns = (p - b.start for p, b in zip(places, blocks, strict=True))
        values = np.empty(codes.shape, BFLOAT16)
        for matrix in np.ndindex(codes.shape[:-2]):  # a matrix at a time, as above
            wide = E4M3[codes[matrix].view(np.uint8)]
            factor = scales[matrix].astype(np.float32)[:, own_columns]
            wide *= factor[own_rows]
            values[matrix] = wide
        return values


class StoredFolder(SafetensorsFolder):
    """A SafetensorsFolder that reads files of torch where there are no safetensors."""

    def _list_others(self):
        if not any(self.path.glob("pytorch_model*.bin")):
            return super()._list_others()
        from jaxtrain.huggingface.torch_files import read_torch_folder  # rarely needed

        return read_torch_folder(self.path)


class PackedFolder(StoredFolder):
    """A SafetensorsFolder that presents quantized tensors as plain ones."""

    def __init__(self, folder: Any):
        super().__init__(folder)
        self._stored = name_plainly(self.tensors, self.path)
        self.tensors = dict(self._stored)
        self.packed: dict[str, PackedTensor] = {
            **find_mxfp4(self._stored),
            **find_fp8(self._stored),
            **find_compressed(self._stored),
        }
        for name in list(self.tensors) if self.packed else ():
            if OF_ACTIVATIONS.search(name) and np.prod(self.tensors[name].shape) == 1:
                del self.tensors[name]
        for name, packed in self.packed.items():
            home = self._stored[packed.parts[0]]
            for part in packed.parts:
                del self.tensors[part]
            self.tensors[name] = TensorLocation(home.file, BFLOAT16, packed.shape, home.offset)

    def fetch(self, name: str, index: Index) -> np.ndarray:
        """Read and decode a part of a tensor."""
        packed = self.packed.get(name)
        if packed is None:
            return super().fetch(name, index)
        return packed.read(lambda part, where: self._stored[part].read(where), index)


def name_plainly(tensors: Mapping[str, TensorLocation], folder: Path) -> dict[str, TensorLocation]:
    """Return the tensors without buffers, by the names that transformers' causal model gives them.
    Raises UserError if two become one."""
    named: dict[str, TensorLocation] = {}
    for name, stored in tensors.items():
        plain = WRAPPED.sub("", name)
        is_mask = MASK.search(plain) and len(stored.shape) == 4 and stored.shape[:2] == (1, 1)
        if BUFFER.search(plain) or is_mask:
            continue
        if plain in named:
            raise UserError(
                f"{folder} holds the tensor {shorten(plain)} twice, once as {shorten(name)};"
                " remove one of the two files"
            )
        named[plain] = stored
    if "model.model.embed_tokens.weight" in named:
        return {name.removeprefix("model."): stored for name, stored in named.items()}
    if {"wte.weight", "ln_f.weight"} <= named.keys():  # GPT-2
        return {f"transformer.{name}": stored for name, stored in named.items()}
    # A draft model has such names, too, and fc.weight.
    headless = {"embed_tokens.weight", "norm.weight"} <= named.keys() and "fc.weight" not in named
    if headless and not any(name.startswith("model.") for name in named):
        return {
            name if name.startswith(("lm_head.", "score.")) else f"model.{name}": stored
            for name, stored in named.items()
        }
    return named


def holds_weights(folder: Path) -> bool:
    """Return whether a folder holds files of weights."""
    return any(any(folder.glob(pattern)) for pattern in ("*.safetensors", "pytorch_model*.bin"))


def find_mxfp4(tensors: Mapping[str, TensorLocation]) -> dict[str, MXFP4Tensor]:
    """Return the tensors stored in MXFP4."""
    matrices = {}
    for name, stored in tensors.items():
        base, end = name.rsplit("_", 1) if "_" in name else (name, "")
        scales = tensors.get(f"{base}_scales")
        if end == "blocks" and scales is not None and stored.dtype == scales.dtype == np.uint8:
            matrices[base] = MXFP4Tensor(base, stored, scales)
    return matrices


def find_fp8(tensors: Mapping[str, TensorLocation]) -> dict[str, FP8]:
    """Return the tensors stored in FP8 with a scale per block."""
    matrices = {}
    for name, scales in tensors.items():
        codes = tensors.get(name.removesuffix(SCALES))
        if name.endswith(SCALES) and codes is not None and codes.dtype == FLOAT8:
            matrices[name.removesuffix(SCALES)] = FP8(name.removesuffix(SCALES), codes, scales)
    return matrices


def without_packing(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json as of a folder of plain weights. Raises UserError for storage that is
    not supported."""
    packing = raw.get("quantization_config")
    if packing is not None and not is_packed(raw):
        method = packing.get("quant_method") if isinstance(packing, Mapping) else None
        description = (
            f"quant_method={spell(method)}" if isinstance(method, str) else "no quant_method"
        )
        raise UserError(
            f"config.json: quantization_config with {description} is not supported; read are"
            f" {', '.join(METHODS)} and plain weights, to which transformers can convert others"
        )
    packing = packing or {}
    block = packing.get("weight_block_size")
    if packing.get("quant_method") == "fp8" and block not in (None, [FP8_BLOCK, FP8_BLOCK]):
        raise UserError(
            f"config.json: quantization_config.weight_block_size is {describe(block)}; weights in"
            f" FP8 are read with scales of blocks of {FP8_BLOCK} x {FP8_BLOCK}, or of whole"
            " matrices (null); convert others to plain weights with transformers"
        )
    if packing.get("quant_method") == MODELOPT:
        check_modelopt(packing)
    if packing.get("quant_method") == TORCHAO:
        check_torchao(packing)
    if packing.get("quant_method") == METHOD:
        check_config(packing)
    return {key: value for key, value in raw.items() if key != "quantization_config"}


def is_packed(raw: Mapping[str, Any]) -> bool:
    """Return True for the config.json of a folder in a supported quantized format."""
    packing = raw.get("quantization_config")
    return isinstance(packing, Mapping) and packing.get("quant_method") in METHODS


def open_folder(folder: Any) -> SafetensorsFolder:
    """Open the tensors of a model's folder, plain or quantized. Raises UserError as
    SafetensorsFolder."""
    return PackedFolder(Path(folder))


BLOCK = 4096
"""Bytes that `fingerprint` reads at the beginning, the middle and the end of each tensor."""


def fingerprint(folder: Path) -> str:
    """Return the sha256 over name, dtype, shape and three blocks of bytes of every tensor: training
    or merging changes a tensor nearly everywhere. Raises UserError as SafetensorsFolder does."""
    tensors = StoredFolder(folder).tensors
    digest = hashlib.sha256()
    for name, stored in sorted(tensors.items()):
        digest.update(repr((name, str(stored.dtype), stored.shape)).encode())
        size = math.prod(stored.shape) * stored.dtype.itemsize
        with stored.file.open("rb") as file:
            for offset in sorted({0, max(size - BLOCK, 0) // 2, max(size - BLOCK, 0)}):
                file.seek(stored.offset + offset)
                digest.update(file.read(min(BLOCK, size)))
    return digest.hexdigest()
