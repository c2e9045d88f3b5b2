"""Matrices in torchao's layout for safetensors, which transformers reads (`pip install torchao`).

    tensors of a matrix X [out, in]: X._weight_qdata int8 or float8_e4m3fn [out, in],
    X._weight_scale float32 [out, 1], and X._weight_zero_point int8 [out, 1] (0) of int8

The header of each file names the tensor subclass of every weight (`__metadata__`), and config.json
the config of torchao that stands for the whole (github.com/pytorch/ao, prototype/safetensors).
Numbers and scales are those of huggingface/compressed.py; activations stay as they are.
"""

import json
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from jaxtrain.huggingface.compressed import TORCHAO
from jaxtrain.huggingface.safetensors import TensorLocation

T = TypeVar("T")
SUBCLASSES = {
    "int8": ("Int8Tensor", {"act_quant_kwargs": None, "reduce_range": False}),
    "fp8": (
        "Float8Tensor",
        {
            "mm_config": None,
            "act_quant_kwargs": None,
            "kernel_preference": {"_type": "KernelPreference", "_data": "AUTO"},
        },
    ),
}
"""Tensor subclass of a scheme, and its attributes beside block_size and dtype."""
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "int8": ("Int8WeightOnlyConfig", {"group_size": None}),
    "fp8": (
        "Float8WeightOnlyConfig",
        {"weight_dtype": {"_type": "torch.dtype", "_data": "float8_e4m3fn"}},
    ),
}


def name_tensors(name: str, parts: Mapping[str, T]) -> dict[str, T]:
    """Return {name of a tensor: value} for {suffix: value} of a matrix `name` ("X.weight")."""
    ends = {"": "qdata", "_scale": "scale", "_zero_point": "zero_point"}
    module, _, weight = name.rpartition(".")
    return {f"{module}._{weight}_{ends[end]}": value for end, value in parts.items()}


def write_metadata(
    scheme: str, tensors: Mapping[str, TensorLocation], names: Collection[str]
) -> dict[str, str]:
    """Return the `__metadata__` of each file. names: the tensors that are quantized."""
    subclass, attributes = SUBCLASSES[scheme]
    data_names = ["qdata", "scale", *(["zero_point"] if scheme == "int8" else [])]
    described = {}
    for name, stored in tensors.items():
        entry: dict[str, Any] = {"_type": "Tensor"}
        if name in names:
            shape = {"block_size": [1, stored.shape[1]]}
            dtype = {"dtype": {"_type": "torch.dtype", "_data": str(stored.dtype)}}
            entry = {"_type": subclass, "_data": {**attributes, **shape, **dtype}}
            entry["_tensor_data_names"] = data_names
        described[name] = json.dumps(entry)
    return {**described, "tensor_names": json.dumps(list(tensors))}


def write_config(scheme: str, ignore: list[str], *, embeddings: bool) -> dict[str, Any]:
    """Return the quantization_config of a folder; ignore: modules stored without quantization."""
    kind, options = CONFIGS[scheme]
    row = {"_type": "PerRow", "_version": 1, "_data": {"dim": -1}}
    data = {**options, "granularity": row, "set_inductor_config": True}
    return {
        "quant_method": TORCHAO,
        "quant_type": {"default": {"_type": kind, "_version": 2, "_data": data}},
        "modules_to_not_convert": ignore,
        "include_input_output_embeddings": embeddings,
        "untie_embedding_weights": False,
    }
