"""Matrices in the layouts of compressed-tensors, which vLLM and transformers read; both directions.
Those of NVIDIA's modelopt, NVFP4 of either, and int8 and float8 of torchao are read.

    scheme  tensors of a matrix X [out, in]                                   w =
    fp8     X.weight float8_e4m3fn [out, in], X.weight_scale [out, 1] or [1]  weight x scale
    int8    X.weight int8 [out, in], X.weight_scale [out, 1] or [1]           weight x scale
    int4    X.weight_packed int32 [out, in / 8], X.weight_scale [out, in / g],  (nibble - 8) x scale
            X.weight_shape int64 [2]
    nvfp4   X.weight_packed uint8 [out, in / 2], X.weight_scale float8        E2M1 x scale / global
            [out, in / 16], X.weight_global_scale [1]
    nvfp4   of modelopt: X.weight uint8, X.weight_scale, X.weight_scale_2     E2M1 x scale x scale_2

A nibble is a code + 8, the lowest of a word first; g is the size of a group, which shares a scale.
Scales are rounded to bfloat16 before they divide the weights (github.com/vllm-project/
compressed-tensors). With fp8 and int8 vLLM also rounds the activations, per token.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.huggingface.files import describe, shorten, spell
from jaxtrain.huggingface.ops import Fetch, Index, full_index
from jaxtrain.huggingface.safetensors import TensorLocation

METHOD = "compressed-tensors"
"""quantization_config.quant_method of such folders."""
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
NIBBLES = 8
"""Codes of 4 bits in a word of weight_packed."""
MODELOPT = "modelopt"
"""quantization_config.quant_method of NVIDIA's folders."""
TORCHAO = "torchao"
"""quantization_config.quant_method of torchao's folders, which huggingface/torchao.py writes."""
TORCHAO_CONFIGS = (
    *("Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"),
    *("Float8WeightOnlyConfig", "Float8DynamicActivationFloat8WeightConfig"),
)
"""Configs of torchao whose weights are read."""
ALGORITHMS = ("FP8", "NVFP4")
"""Values of quant_algo of modelopt that are read."""
NVFP4_FORMAT, NVFP4_GROUP = "nvfp4-pack-quantized", 16
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
PAIRS = np.stack([E2M1[np.arange(256) & 15], E2M1[np.arange(256) >> 4]], -1)
"""float32 [256, 2]: both codes of a byte, the first in its low half."""


@dataclass(frozen=True)
class Scheme:
    """Storage of a matrix's weights, and vLLM's treatment of activations."""

    format: str
    """quantization_config.format."""
    bits: int
    kind: str
    """"float" or "int"."""
    steps: float
    """The largest magnitude of a scale's numbers becomes this code: half of an integer's range, so
    that the largest positive one is half a step off and all others are finer."""
    grouped: bool = False
    activations: bool = True
    """Whether activations are rounded to the same numbers."""


SCHEMES = {
    "fp8": Scheme("float-quantized", 8, "float", 448.0),
    "int8": Scheme("int-quantized", 8, "int", 127.5),
    "int4": Scheme("pack-quantized", 4, "int", 7.5, grouped=True, activations=False),
}
FORMATS = {scheme.format: name for name, scheme in SCHEMES.items()}


def encoded_shapes(
    scheme: Scheme, shape: tuple[int, ...], group: int
) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Return {suffix of the name: (shape, dtype)} of the tensors of a matrix [out, in]."""
    num_out, num_in = shape
    if not scheme.grouped:
        codes = np.dtype(np.int8) if scheme.kind == "int" else FLOAT8
        return {"": (shape, codes), "_scale": ((num_out, 1), BFLOAT16)}
    return {
        "_packed": ((num_out, num_in // NIBBLES), np.dtype(np.int32)),
        "_scale": ((num_out, num_in // group), BFLOAT16),
        "_shape": ((2,), np.dtype(np.int64)),
    }


def encode(scheme: Scheme, matrix: np.ndarray, group: int) -> dict[str, np.ndarray]:
    """Return {suffix: array} of rows [rows, in] of finite numbers, rounded to nearest, without
    weight_shape. Rows are independent."""
    wide = matrix.astype(np.float32)
    rows, num_in = wide.shape
    groups = wide.reshape(rows, -1, group if scheme.grouped else num_in)
    scale = (np.abs(groups).max(-1) / np.float32(scheme.steps)).astype(BFLOAT16)
    # So small that no bfloat16 is left for it, or all zeros: its codes are 0.
    scale = np.where(scale > 0, scale, np.array(1, BFLOAT16))
    codes = (groups / scale.astype(np.float32)[..., None]).reshape(rows, num_in)
    if scheme.kind == "float":
        return {"": np.clip(codes, -448, 448).astype(FLOAT8), "_scale": scale}
    top = 2 ** (scheme.bits - 1)
    codes = np.clip(np.rint(codes), -top, top - 1).astype(np.int8)
    if scheme.bits == 8:
        return {"": codes, "_scale": scale}
    nibbles = (codes + 8).astype(np.uint32).reshape(rows, -1, NIBBLES)
    shifts = np.arange(NIBBLES, dtype=np.uint32) * 4
    packed = np.bitwise_or.reduce(nibbles << shifts, axis=-1)
    return {"_packed": packed.view(np.int32), "_scale": scale}


class Compressed:
    """A matrix [out, in] stored in these layouts; a `packed.PackedTensor`."""

    def __init__(
        self, name: str, tensors: Mapping[str, TensorLocation], parts: tuple[str, ...] = ()
    ):
        """name: "X.weight". parts: names of codes, scales and zero points, where they are not those
        of compressed-tensors."""
        self.grouped = f"{name}_packed" in tensors
        ends = ("_packed", "_scale", "_shape") if self.grouped else ("", "_scale")
        self.parts = parts or tuple(name + end for end in ends)
        for zeros in parts[2:]:
            if tensors[zeros].read(full_index(tensors[zeros].shape)).any():
                raise UserError(
                    f"{tensors[zeros].file}: {shorten(zeros)} is not 0; read are symmetric weights"
                )
        codes, scales = tensors[self.parts[0]], tensors[self.parts[1]]
        shape = codes.shape
        if self.grouped:
            stored_shape = tensors.get(self.parts[2])
            if stored_shape is None or stored_shape.shape != (2,) or stored_shape.dtype != np.int64:
                raise UserError(f"{codes.file}: {shorten(name)}_packed has no {name}_shape of 2")
            shape = tuple(int(size) for size in stored_shape.read(full_index((2,))))
        num_out, num_in = shape if len(shape) == 2 else (0, 0)
        self.whole = scales.shape in ((), (1,)) and not self.grouped
        count = scales.shape[1] if len(scales.shape) == 2 else int(self.whole)
        fits = count > 0 and num_in % count == 0 and (self.whole or scales.shape[0] == num_out)
        if self.grouped:
            fits = fits and codes.shape == (num_out, -(-num_in // NIBBLES))
        if not fits:
            raise UserError(
                f"{codes.file}: {shorten(self.parts[0])} {codes.shape} and {self.parts[1]}"
                f" {scales.shape} do not belong together as weights {shape}: one scale for each"
                " row, for each group of a row, or for all"
            )
        self.shape, self.scales = shape, scales.shape
        self.group = num_in // count

    def read(self, fetch: Fetch, index: Index) -> np.ndarray:
        """Return [index] in bfloat16, decoded as in transformers."""
        rows, columns = index
        if self.grouped:
            first, last = columns.start // NIBBLES, -(-columns.stop // NIBBLES)
            words = fetch(self.parts[0], (rows, slice(first, last))).view(np.uint32)
            shifts = np.arange(NIBBLES, dtype=np.uint32) * 4
            codes = ((words[..., None] >> shifts) & 15).astype(np.float32).reshape(len(words), -1)
            inside = slice(columns.start - first * NIBBLES, columns.stop - first * NIBBLES)
            wide = codes[:, inside][:, :: columns.step or 1] - 8
        else:
            wide = fetch(self.parts[0], index).astype(np.float32)
        if self.whole:
            scale = fetch(self.parts[1], full_index(self.scales))
            return (wide * scale.astype(np.float32)).astype(BFLOAT16)
        first = columns.start // self.group
        scales = fetch(self.parts[1], (rows, slice(first, -(-columns.stop // self.group))))
        group_index = (
            np.arange(columns.start, columns.stop, columns.step or 1) // self.group - first
        )
        wide *= scales.astype(np.float32)[:, group_index]
        return wide.astype(BFLOAT16)


class NVFP4:
    """A matrix [out, in] stored in E2M1 with a scale for 16 numbers and one for all; a
    `packed.PackedTensor`."""

    def __init__(self, name: str, tensors: Mapping[str, TensorLocation]):
        """name: "X.weight"."""
        self.divides = f"{name}_packed" in tensors
        ends = (
            ("_packed", "_scale", "_global_scale") if self.divides else ("", "_scale", "_scale_2")
        )
        self.parts = tuple(name + end for end in ends)
        codes, scales = (tensors[part] for part in self.parts[:2])
        factor = tensors.get(self.parts[2])
        self.shape = (*codes.shape[:-1], 2 * codes.shape[-1])
        expected = (*codes.shape[:-1], 2 * codes.shape[-1] // NVFP4_GROUP)
        if scales.shape != expected or factor is None or factor.shape not in ((), (1,)):
            raise UserError(
                f"{codes.file}: {shorten(self.parts[0])} {codes.shape} needs {self.parts[1]}"
                f" {expected} and {self.parts[2]} with one number, as weights in NVFP4"
            )
        self.factor = factor.shape

    def read(self, fetch: Fetch, index: Index) -> np.ndarray:
        """Return [index] in bfloat16."""
        *lead, columns = index
        first, last = columns.start // NVFP4_GROUP, -(-columns.stop // NVFP4_GROUP)
        half = NVFP4_GROUP // 2
        codes = fetch(self.parts[0], (*lead, slice(first * half, last * half)))
        scales = fetch(self.parts[1], (*lead, slice(first, last))).astype(np.float32)
        factor = fetch(self.parts[2], full_index(self.factor)).astype(np.float32)
        scales = scales / factor if self.divides else scales * factor
        wide = PAIRS[codes].reshape(*scales.shape, NVFP4_GROUP) * scales[..., None]
        offset = first * NVFP4_GROUP
        inside = slice(columns.start - offset, columns.stop - offset, columns.step)
        return wide.reshape(*scales.shape[:-1], -1)[..., inside].astype(BFLOAT16)


def find_compressed(tensors: Mapping[str, TensorLocation]) -> dict[str, Compressed | NVFP4]:
    """Return the matrices that these tensors store in one of the layouts."""
    matrices: dict[str, Compressed | NVFP4] = {}
    for name, scales in tensors.items():
        if name.endswith("._weight_scale"):  # of torchao
            stem = name.removesuffix("scale")
            parts = tuple(stem + end for end in ("qdata", "scale", "zero_point"))
            present = tuple(part for part in parts if part in tensors)
            if present[0] == parts[0] and tensors[parts[0]].dtype in (np.dtype(np.int8), FLOAT8):
                weight = f"{stem.removesuffix('_weight_')}weight"
                matrices[weight] = Compressed(weight, tensors, present)
            continue
        base = name.removesuffix("_scale")
        if base == name or not base.endswith(".weight"):
            continue
        codes, words = tensors.get(base), tensors.get(f"{base}_packed")
        stored = words if words is not None else codes
        if stored is not None and stored.dtype == np.uint8 and scales.dtype == FLOAT8:
            matrices[base] = NVFP4(base, tensors)
        elif words is not None and words.dtype == np.int32:
            matrices[base] = Compressed(base, tensors)
        elif codes is not None and codes.dtype in (np.dtype(np.int8), FLOAT8):
            matrices[base] = Compressed(base, tensors)
    return matrices


def write_config(scheme: Scheme, group: int, ignore: list[str]) -> dict[str, Any]:
    """Return the quantization_config of a folder; ignore: modules stored without quantization."""
    kind = {"num_bits": scheme.bits, "type": scheme.kind, "symmetric": True}
    form = {"strategy": "group", "group_size": group} if scheme.grouped else {"strategy": "channel"}
    token = {**kind, "strategy": "token", "dynamic": True}
    return {
        "quant_method": METHOD,
        "format": scheme.format,
        "quantization_status": "compressed",
        "ignore": ignore,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**kind, **form, "dynamic": False},
                "input_activations": token if scheme.activations else None,
                "output_activations": None,
            }
        },
    }


def check_config(packing: Mapping[str, Any]) -> None:
    """Raise UserError for a quantization_config that is not supported."""
    key_path = f"config.json: quantization_config of {METHOD}"
    advice = "; convert such weights to plain ones with transformers"
    if packing.get("format") not in (*FORMATS, NVFP4_FORMAT):
        raise UserError(
            f"{key_path}: format is {describe(packing.get('format'))}; read are"
            f" {', '.join(FORMATS)}, {NVFP4_FORMAT}{advice}"
        )
    groups = packing.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise UserError(f"{key_path}: config_groups is {describe(groups)}, not the schemes by name")
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            raise UserError(f"{key_path}: {spell(name)}.weights is {describe(weights)}")
        for key, allowed in (("symmetric", (True, None)), ("actorder", (None,))):
            if weights.get(key) not in allowed:
                raise UserError(f"{key_path}: {spell(name)}.weights.{key} is not read{advice}")
        form = (weights.get("type"), weights.get("num_bits"))
        read = {(scheme.kind, scheme.bits) for scheme in SCHEMES.values()}
        if form not in read and (form != ("float", 4) or weights.get("group_size") != NVFP4_GROUP):
            raise UserError(
                f"{key_path}: {spell(name)} has weights of {describe(form[1])} bits, type"
                f" {describe(form[0])}; read are fp8, int8, int4 and nvfp4{advice}"
            )


def check_torchao(packing: Mapping[str, Any]) -> None:
    """Raise UserError for a quantization_config of torchao that is not supported."""
    described = packing.get("quant_type")
    kind = described.get("default") if isinstance(described, Mapping) else None
    kind = kind.get("_type") if isinstance(kind, Mapping) else described
    if kind not in TORCHAO_CONFIGS:
        raise UserError(
            f"config.json: quantization_config of {TORCHAO}: quant_type is {describe(kind)}; read"
            f" are {', '.join(TORCHAO_CONFIGS)}; convert such weights to plain ones with"
            " transformers"
        )


def check_modelopt(packing: Mapping[str, Any]) -> None:
    """Raise UserError for a quantization_config of modelopt that is not supported."""
    algorithm = packing.get("quant_algo")
    if algorithm not in ALGORITHMS:
        raise UserError(
            f"config.json: quantization_config of {MODELOPT}: quant_algo is {describe(algorithm)};"
            f" read are {' and '.join(ALGORITHMS)}. Name the model that it was made of, whose"
            " weights are plain"
        )
