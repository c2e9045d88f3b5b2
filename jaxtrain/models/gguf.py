"""Models in GGUF files: opened as Hugging Face folders, and written from them.

A file is opened by writing its folder once into the Hugging Face cache, tensor by tensor (quantized
ones decoded to bfloat16), so that everything that reads folders reads it. The cache's name follows
from the file's place, size and times.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from huggingface_hub.constants import HF_HOME

from jaxtrain.errors import UserError
from jaxtrain.huggingface.gguf_file import PLAIN, GgufFile, load_package
from jaxtrain.huggingface.gguf_quants import BF16, F16, F32, Q4_0, Q4_K, Q5_0, Q8_0, write_gguf
from jaxtrain.huggingface.gguf_tokenizer import KEY, describe_tokenizer, write_tokenizer
from jaxtrain.huggingface.ops import SplitPiece, full_index
from jaxtrain.huggingface.packed import open_folder
from jaxtrain.huggingface.safetensors import write_folder
from jaxtrain.models import families
from jaxtrain.models.gguf_names import ATTRIBUTES, FAMILIES, OUTER, GgufFamily

TYPES = {"f16": F16, "bf16": BF16, "q8_0": Q8_0, "q4_0": Q4_0, "q4_k": Q4_K}
"""Types that matrices are written in."""
FILE_TYPES = {"f16": 1, "bf16": 32, "q8_0": 7, "q4_0": 2, "q4_k": 14}
"""general.file_type."""
BLOCKS = {Q8_0: 32, Q4_0: 32, Q5_0: 32, Q4_K: 256}
FALLBACK = {Q4_K: Q5_0, Q5_0: F16, Q8_0: F16, Q4_0: F16}
"""The type of a matrix whose rows hold no whole blocks."""
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
CACHE = "jaxtrain-gguf"
"""Folder in the Hugging Face cache with the folders that files were opened as."""


def open_gguf(path: Path) -> Path:
    """Return the folder of a GGUF file, or of the one that a folder holds. Raises UserError for
    another family or format."""
    if path.is_dir():
        files = sorted(path.glob("*.gguf"))
        if len(files) != 1:
            names = ", ".join(file.name for file in files[:8])
            raise UserError(f"{path} holds several GGUF files ({names}); name one of them")
        path = files[0]
    status = os.stat(path)
    identity = (os.path.realpath(path), status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    digest = hashlib.sha256(repr(identity).encode()).hexdigest()[:16]
    folder = Path(HF_HOME) / CACHE / f"{path.stem}-{digest}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=folder.parent))
    try:
        read_gguf(path, unfinished)
        try:
            os.rename(unfinished, folder)
        except OSError:  # another process was first
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def read_gguf(path: Path, folder: Path) -> None:
    """Write the Hugging Face folder of a GGUF file."""
    file = GgufFile(path)
    family, raw = read_config(file)
    heads = raw["num_attention_heads"], raw["num_key_value_heads"]
    plan: dict[str, tuple[tuple[int, ...], np.dtype]] = {}
    homes: dict[str, tuple[str, int | None]] = {}
    for name, tensor in file.tensors.items():
        if name in ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"):
            continue
        target = to_hf(name, family)
        if target is None:
            raise UserError(f"{path}: tensor {name} is none of {family.architecture}")
        dtype = PLAIN.get(tensor.kind, BFLOAT16)
        for expert in range(tensor.shape[0]) if "{}" in target else (None,):
            shape = tensor.shape if expert is None else tensor.shape[1:]
            full_name = target if expert is None else target.format(expert)
            plan[full_name], homes[full_name] = (shape, dtype), (name, expert)

    def pieces() -> Iterator[SplitPiece]:
        for target, (name, expert) in homes.items():
            array = change(file.fetch(name, expert), target, family, heads, back=True)
            yield SplitPiece(target, array.shape, full_index(array.shape), array)

    common = max(plan.values(), key=lambda spec: int(np.prod(spec[0])))[1]
    write_tokenizer(file.metadata, folder, str(path))
    write_folder(folder, plan, pieces())
    raw["torch_dtype"] = str(common)
    (folder / "config.json").write_text(json.dumps(raw, indent=2, sort_keys=True) + "\n")


def to_hf(name: str, family: GgufFamily) -> str | None:
    """Return the Hugging Face name of a tensor, None for an unknown one."""
    if name in OUTER:
        return OUTER[name]
    parts = name.split(".")
    if len(parts) != 4 or parts[0] != "blk" or parts[2] not in family.layer:
        return None
    return f"model.layers.{parts[1]}.{family.layer[parts[2]]}.{parts[3]}"


def change(
    array: np.ndarray, name: str, family: GgufFamily, heads: tuple[int, int], back: bool
) -> np.ndarray:
    """Return the numbers of a tensor as GGUF has them, or `back`. heads: of queries, of keys."""
    module = name.rsplit(".", 2)[-2]
    if family.interleaved and module in ("q_proj", "k_proj"):
        count = heads[module == "k_proj"]
        half = len(array) // count // 2
        split = (count, half, 2) if back else (count, 2, half)
        return array.reshape(*split, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
    if family.norm_offset and module.endswith("norm"):
        return array.astype(np.float32) + family.norm_offset * (-1 if back else 1)
    return array


def read_config(file: GgufFile) -> tuple[GgufFamily, dict[str, Any]]:
    """Return the family and the content of config.json of a file."""
    data, name = file.metadata, file.metadata.get("general.architecture")
    family = next((entry for entry in FAMILIES if entry.name == name), None)
    if family is None:
        known = ", ".join(dict.fromkeys(entry.name for entry in FAMILIES))
        raise UserError(f"{file.path}: GGUF of architecture {name!r} is not read; {known} are")
    keys = {**ATTRIBUTES, **family.attributes}
    raw = {keys[key]: data[f"{name}.{key}"] for key in keys if f"{name}.{key}" in data}
    missing = [key for key in list(ATTRIBUTES)[:5] if ATTRIBUTES[key] not in raw]
    if missing or "token_embd.weight" not in file.tensors:
        raise UserError(f"{file.path}: {', '.join(missing) or 'token_embd.weight'} is missing")
    raw.setdefault("num_key_value_heads", raw["num_attention_heads"])
    if family.rotated and f"{name}.rope.dimension_count" in data:
        raw.setdefault(family.rotated, data[f"{name}.rope.dimension_count"])
    module = families.find_family(family.architecture)
    model_type = getattr(module.Config, "text_type", module.Config.model_type)
    raw |= {"architectures": [family.architecture], "model_type": model_type, **family.constant}
    raw["vocab_size"] = file.tensors["token_embd.weight"].shape[0]
    raw["tie_word_embeddings"] = "output.weight" not in file.tensors
    raw["rope_theta"] = data.get(f"{name}.rope.freq_base", 10000.0)
    if family.name.startswith("gemma"):
        raw["query_pre_attn_scalar"] = query_scale(raw)
    if "blk.0.attn_q.bias" in file.tensors and name == "llama":
        raw["attention_bias"] = True
    if raw.get("sliding_window") == 0 or (name == "phi3" and not raw.get("sliding_window")):
        raw["sliding_window"] = None
    if scaling := read_scaling(file, name, raw):
        raw["rope_scaling"] = scaling
    for role in ("bos", "eos"):
        if type(data.get(f"{KEY}{role}_token_id")) is int:
            raw[f"{role}_token_id"] = data[f"{KEY}{role}_token_id"]
    return family, raw


def query_scale(raw: Mapping[str, Any]) -> int:
    """Return Gemma's query_pre_attn_scalar as llama.cpp takes it: by the sizes of the 27B models,
    else head_dim."""
    big = raw["num_hidden_layers"] == (46 if raw.get("attn_logit_softcapping") else 62)
    return raw["hidden_size"] // raw["num_attention_heads"] if big else raw["head_dim"]


def read_scaling(file: GgufFile, name: str, raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return rope_scaling of a file. Raises UserError for one that config.json cannot name."""
    data = file.metadata
    kind = data.get(f"{name}.rope.scaling.type", "none")
    length = data.get(f"{name}.rope.scaling.original_context_length")
    if "rope_factors_long.weight" in file.tensors:
        lists = {
            f"{part}_factor": file.fetch(f"rope_factors_{part}.weight").astype(float).tolist()
            for part in ("long", "short")
        }
        return {"rope_type": "longrope", **lists}
    if "rope_freqs.weight" in file.tensors:
        return _read_llama3(file, raw)
    if kind == "none":
        return None
    factor = data.get(f"{name}.rope.scaling.factor", 1.0)
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn" and length:
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": length}
    raise UserError(f"{file.path}: rope.scaling.type {kind!r} is not read; linear and yarn are")


def _read_llama3(file: GgufFile, raw: Mapping[str, Any]) -> dict[str, Any]:
    from jaxtrain.layers.rope import frequencies

    divisors = file.fetch("rope_freqs.weight").astype(np.float64)
    scaling = {"rope_type": "llama3", "factor": float(divisors.max())}
    scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 8192
    plain = {"rope_theta": raw["rope_theta"]}
    size = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    expected = frequencies(size, plain)[0] / frequencies(size, {**plain, **scaling})[0]
    if not np.allclose(divisors, expected, rtol=1e-4):
        raise UserError(f"{file.path}: rope_freqs.weight is not that of Llama 3's scaling")
    return scaling


def export_gguf(folder: Path, output: Path, kind: str, tokenizer: Any) -> None:
    """Write a model folder as one GGUF file, matrices in one of TYPES. Raises UserError for a
    family or a setting that the format has no name for."""
    load_package("export --gguf")
    config = families.read_config(folder)
    raw = config.to_hf()
    raw = raw.get("text_config", raw) | {"architectures": [config.architecture]}
    family = next((entry for entry in FAMILIES if entry.architecture == config.architecture), None)
    if family is None:
        known = ", ".join(entry.architecture for entry in FAMILIES)
        raise UserError(f"{folder}: {config.architecture} is not written as GGUF; {known} are")
    raw["head_dim"] = config.head_size
    check_expressible(raw, family)
    files, prefix = open_folder(folder), getattr(config, "prefix", "model.")
    left_out = (*config.carries, *getattr(config, "tower_tensors", ()), "\0")
    tensors = {
        f"model.{name.removeprefix(prefix)}" if name.startswith(prefix) else name: name
        for name in files.tensors
        if not name.startswith(left_out)
    }
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    names: dict[str, list[str]] = {}
    for name in sorted(tensors, key=_natural):
        names.setdefault(to_gguf(name, family), []).append(name)
    plan = {}
    for target, sources in names.items():
        shape = files.tensors[tensors[sources[0]]].shape
        full = (len(sources), *shape) if "_exps." in target else shape
        plan[target] = (full, choose_type(target, full, TYPES[kind]))
    heads = config.num_attention_heads, config.num_key_value_heads

    def make(target: str) -> Iterator[np.ndarray]:
        for name in names.get(target, ()):
            stored = tensors[name]
            array = files.fetch(stored, full_index(files.tensors[stored].shape))
            yield change(array, name, family, heads, back=False)
        if target == "rope_freqs.weight":
            yield llama3_divisors(config)

    if dict(config.rope).get("rope_type") == "llama3":
        plan["rope_freqs.weight"] = ((config.head_size // 2,), F32)
    metadata = describe(raw, family, kind) | describe_tokenizer(tokenizer, config.vocab_size)
    unfinished = output.with_name(f".{output.name}.unfinished")
    try:
        write_gguf(unfinished, family.name, metadata, plan, make)
        os.replace(unfinished, output)
    finally:
        unfinished.unlink(missing_ok=True)


def llama3_divisors(config: Any) -> np.ndarray:
    """Return what llama.cpp divides the frequencies of a Llama 3 by, float32 [H / 2]."""
    from jaxtrain.layers.rope import frequencies

    plain = frequencies(config.head_size, {"rope_theta": dict(config.rope)["rope_theta"]})[0]
    return (plain / config.encodings()["default"][0]).astype(np.float32)


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def to_gguf(name: str, family: GgufFamily) -> str:
    """Return the GGUF name of a Hugging Face tensor; that of all experts for one of an expert."""
    outer = {hf: ours for ours, hf in OUTER.items()}
    if name in outer:
        return outer[name]
    parts = name.split(".")
    inner = ".".join("{}" if part.isdigit() else part for part in parts[3:-1])
    # Where a family names a tensor twice, the later one is its own.
    target = {hf: ours for ours, hf in family.layer.items()}.get(inner)
    if parts[:2] != ["model", "layers"] or target is None:
        raise UserError(f"tensor {name} has no name in GGUF for {family.architecture}")
    return f"blk.{parts[2]}.{target}.{parts[-1]}"


def choose_type(name: str, shape: tuple[int, ...], kind: int) -> int:
    """Return the type number of a tensor: float32 of vectors and routers, Q8_0 of tables beside
    four bits, and where rows hold no whole blocks, the next wider type."""
    if len(shape) < 2 or "ffn_gate_inp" in name:
        return F32
    if kind in (Q4_0, Q4_K) and name in ("token_embd.weight", "output.weight"):
        kind = Q8_0
    while shape[-1] % BLOCKS.get(kind, 1):
        kind = FALLBACK[kind]
    return kind


def check_expressible(raw: Mapping[str, Any], family: GgufFamily) -> None:
    """Raise UserError for settings that llama.cpp does not compute."""
    problems = [
        f"{key}={raw[key]}"
        for key, v in family.constant.items()
        if raw.get(key, v) not in (v, None)
    ]
    if family.name.startswith("gemma") and raw["query_pre_attn_scalar"] != query_scale(raw):
        problems.append(f"query_pre_attn_scalar={raw['query_pre_attn_scalar']}")
    rope = raw.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    if rope.get("rope_type", "default") not in ("default", "linear", "yarn", "llama3"):
        problems.append(f"rope_type={rope['rope_type']}")
    interval = raw.get("no_rope_layer_interval", 4)
    expected = [int((n + 1) % 4 != 0) for n in range(raw["num_hidden_layers"])]
    if interval != 4 or raw.get("no_rope_layers", expected) != expected:
        problems.append("no_rope_layers")
    if raw.get("use_sliding_window") and family.name.startswith("qwen"):
        problems.append("use_sliding_window=true")
    if problems:
        raise UserError(f"GGUF of {family.name} has no key for {', '.join(problems)}")


def describe(raw: Mapping[str, Any], family: GgufFamily, kind: str) -> dict[str, Any]:
    """Return the metadata of a config.json."""
    name = family.name
    data: dict[str, Any] = {
        f"{name}.{key}": raw[attribute]
        for key, attribute in {**ATTRIBUTES, **family.attributes}.items()
        if raw.get(attribute) is not None
    }
    rope = raw.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    window = raw.get("sliding_window")
    if name in ("llama", "phi3") and window:  # ignored by llama.cpp there: alike up to its length
        data[f"{name}.context_length"] = min(window, raw["max_position_embeddings"])
    size = raw["head_dim"]
    share = rope.get("partial_rotary_factor") or 1.0
    data |= {
        f"{name}.attention.value_length": size,
        f"{name}.rope.dimension_count": int(size * share),
        f"{name}.rope.freq_base": float(rope["rope_theta"]),
        f"{name}.vocab_size": raw["vocab_size"],
        "general.file_type": FILE_TYPES[kind],
        "general.quantization_version": 2,
    }
    if rope.get("rope_type") in ("linear", "yarn"):
        data[f"{name}.rope.scaling.type"] = rope["rope_type"]
        data[f"{name}.rope.scaling.factor"] = float(rope["factor"])
        if length := rope.get("original_max_position_embeddings"):
            data[f"{name}.rope.scaling.original_context_length"] = length
    return data
