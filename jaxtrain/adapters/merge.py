"""Merge adapters into the weights of a Hugging Face folder, one tensor at a time.

Works on folders alone, by tensor names, and by the family's names if several matrices share a
tensor. So the host never holds more than one matrix, whatever the size of the model.
"""

import dataclasses
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from jaxtrain.adapters.fused import NAME as FUSED
from jaxtrain.adapters.fused import TensorScales, find_tensors
from jaxtrain.adapters.nf4 import round_trip_with_absmax
from jaxtrain.adapters.peft import find_pairs
from jaxtrain.adapters.peft_experts import innermost
from jaxtrain.adapters.peft_folder import (
    BELOW,
    PREFIX,
    ROWS,
    SUFFIX,
    PeftFolder,
    check_orientation,
    find_head,
    open_peft,
)
from jaxtrain.adapters.spec import LoRASpec, find_adaptable
from jaxtrain.adapters.storage import find_stored, round_trip, store_kernels
from jaxtrain.errors import UserError
from jaxtrain.huggingface.config import hf_defaults
from jaxtrain.huggingface.copy import TensorChanges, copy_folder, is_float
from jaxtrain.huggingface.files import check_inside, read_object, spell
from jaxtrain.huggingface.generation import NAME as GENERATION
from jaxtrain.huggingface.ops import HEAD_BIAS, HEADS, StackedOps, TensorOp, Transpose, full_index
from jaxtrain.huggingface.packed import open_folder
from jaxtrain.huggingface.safetensors import CODES, MAX_SHARD_BYTES, RoundingLoss, SafetensorsFolder
from jaxtrain.models import build, families
from jaxtrain.models.decoder_config import DecoderConfig
from jaxtrain.models.parameters import split_model

NAMES = ("embed_in", "embed_tokens", "embeddings", "word_embeddings", "wte")
EMBEDDINGS = tuple(f".{name}.weight" for name in NAMES)
ENDS = (*EMBEDDINGS, *(f".{name}" for name in HEADS))
TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt"),
)


@dataclasses.dataclass(frozen=True)
class Correction:
    """The change that an adapter makes to one tensor of the base."""

    peft: PeftFolder
    tensor: str
    slot: LoRASpec | None
    """None: the adapter holds the whole tensor."""

    def apply(self, base: np.ndarray, index: int | None) -> np.ndarray:
        """Return the merged tensor [out, in] in float32; [in, out] if the base has it so."""
        if self.slot is None:
            return fetch(self.peft, self.tensor)
        if self.peft.inputs_first:
            return self._merge(base.T, self.slot).T
        return self._merge(base, self.slot)

    def _merge(self, base: np.ndarray, slot: LoRASpec) -> np.ndarray:
        module = self.tensor.removesuffix(".weight")
        down = fetch(self.peft, f"{module}.{SUFFIX['a']}").astype(np.float32)
        up = fetch(self.peft, f"{module}.{SUFFIX['b']}").astype(np.float32)
        merged = base.astype(np.float32)
        merged += np.float32(slot.scale) * (up @ down)
        if slot.dora:
            magnitude = fetch(self.peft, f"{module}.{SUFFIX['magnitude']}").astype(np.float32)
            # numpy sums float32 rows pairwise: exact enough for rows of any length.
            merged *= (magnitude / np.sqrt(np.square(merged).sum(1)))[:, None]
        return merged


@dataclasses.dataclass(frozen=True)
class RowCorrection:
    """The change to a table by an adapter with rows of it, which may extend the table."""

    peft: PeftFolder
    tensor: str
    ids: tuple[int, ...]
    total: int
    below: str | None = None
    """The adapter's tensor with the rows that the base lacks; None: they are its mean."""

    def apply(self, base: np.ndarray, index: int | None) -> np.ndarray:
        """Return the merged table [total, D] in float32, or the bias [total] of a head."""
        wide = base.astype(np.float32)
        merged = np.empty((self.total, *base.shape[1:]), np.float32)
        merged[: len(wide)] = wide
        merged[len(wide) :] = wide.mean(0)
        if self.below is not None:
            added_rows = fetch(self.peft, self.below)[len(wide) :]
            merged[len(wide) :][: len(added_rows)] = added_rows
        if self.ids:
            merged[list(self.ids)] = fetch(self.peft, self.tensor)
        return merged


@dataclasses.dataclass(frozen=True)
class ExpertCorrection:
    """The change to a matrix of one expert by a pair for all experts of a layer."""

    peft: PeftFolder
    module: str
    slot: LoRASpec
    num_experts: int
    expert: int | None = None
    """Whose tensor it is; None: the tensor holds all experts."""
    outputs: slice | None = None
    """Of the pair, those of this tensor; None: all."""
    transposed: bool = False
    """Whether the pair's product is the tensor's change transposed."""

    def apply(self, base: np.ndarray, index: int | None) -> np.ndarray:
        """Return the merged matrix in float32, that of expert `index` if the tensor holds all
        experts."""
        expert = index if self.expert is None else self.expert
        assert expert is not None, "a tensor of all experts comes an expert at a time"
        rank = self.slot.rank
        rows = (slice(expert * rank, (expert + 1) * rank), slice(None))
        columns = (self.outputs or slice(None), slice(expert, None, self.num_experts))
        down = fetch(self.peft, f"{self.module}.{SUFFIX['a']}", rows).astype(np.float32)
        up = fetch(self.peft, f"{self.module}.{SUFFIX['b']}", columns).astype(np.float32)
        delta = np.float32(self.slot.scale) * (up @ down)
        return base.astype(np.float32) + (delta.T if self.transposed else delta)


def fetch(peft: PeftFolder, name: str, index: Any = ()) -> np.ndarray:
    """Return a tensor of the adapter, or a part of it."""
    name = PREFIX + name
    return peft.files.fetch(name, index or full_index(peft.files.tensors[name].shape))


class MergeReport(NamedTuple):
    """Result of a merge."""

    changed: int
    """Number of tensors that the adapter changed."""
    lost: float
    """Rounding of the merged tensors to the dtypes that they are stored in, as a share of the
    adapter's changes: the ratio of the two root mean squares."""


class MatrixLocation(NamedTuple):
    """The location of a parameter's matrix in a tensor of a folder."""

    path: str
    """Of the Linear."""
    op: TensorOp
    shape: tuple[int, ...]
    """What `op` makes: of all experts where they are one tensor."""
    layer: int
    expert: int | None


class RoundTrip:
    """Tensors of a folder as a quantized run saw them: each kernel quantized separately, also if
    several share a tensor, or together with the others of its tensor in memory (nf4_fused)."""

    def __init__(self, config: DecoderConfig, kind: str, files: SafetensorsFolder):
        self.kind = kind
        tensors = find_tensors(config) if kind == FUSED else {}
        self.scales = TensorScales(config, tensors, files.fetch) if tensors else None
        shapes, _ = split_model(build.abstract(config))
        stored, _ = split_model(store_kernels(build.abstract(config), kind, tensors))
        self.matrices: dict[str, list[MatrixLocation]] = {}
        ops = {entry.param: entry.op for entry in families.family(config).names(config)}
        for kernel in find_stored(stored, kind):
            path = kernel.removesuffix(".kernel")
            for indices, op, shape in _matrices(ops[kernel], shapes[kernel].shape):
                layer, expert = (*indices, None, None)[:2]
                for name in op.shapes(shape):
                    location = MatrixLocation(path, op, shape, layer or 0, expert)
                    self.matrices.setdefault(name, []).append(location)

    def __call__(self, name: str, array: np.ndarray, index: int | None) -> np.ndarray:
        """Return a tensor, or expert `index` of one with all experts, in its own dtype."""
        if name not in self.matrices:
            return array
        out = np.array(array if index is None else array[None])
        source = out.copy()
        for location in self.matrices[name]:
            shape = location.shape if index is None else (1, *location.shape[1:])
            kernel = location.op.read(lambda _, part: source[part], full_index(shape))
            wide = np.asarray(kernel, np.float32).reshape(shape[-2:])
            if self.scales is not None and location.path in self.scales.tensors:
                expert = location.expert if index is None else index
                absmax = self.scales(location.path, location.layer, expert or 0)
                restored = round_trip_with_absmax(wide, absmax)
            else:
                restored = round_trip(wide, self.kind)
            kernel = np.asarray(restored).reshape(shape).astype(array.dtype)
            for piece in location.op.write(kernel, np.asarray):
                out[piece.index] = piece.array
        return out if index is None else out[0]


def _matrices(
    op: TensorOp, shape: tuple[int, ...], indices: tuple[int, ...] = ()
) -> Iterator[tuple[tuple[int, ...], TensorOp, tuple[int, ...]]]:
    """Yield (indices, op, shape) of the matrices that a parameter stacks."""
    if not isinstance(op, StackedOps):
        yield indices, op, shape
        return
    for index, inner in enumerate(op.ops):
        yield from _matrices(inner, shape[1:], (*indices, index))


def merge_adapter(
    base: str | os.PathLike,
    adapter: str | os.PathLike,
    output: str | os.PathLike,
    dtype: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    quantize: str = "none",
    family: str | None = None,
    keys: Mapping[str, Any] = MappingProxyType({}),
) -> MergeReport:
    """Write the model of `base` with the PEFT folder `adapter` merged in to `output`, with the
    adapter's tokenizer if it has one.

    Tensors keep their dtypes unless `dtype` is set. quantize: storage of the weights during
    training; tensors stored so are quantized and dequantized before the merge. A tied base of
    which the adapter changes the embedding or the head alone becomes untied. family: as
    model.family. keys: values of config.json that the adapter's tokens change. Raises one UserError
    for all that cannot be merged, before writing.
    """
    base, output = Path(base), Path(output)
    files = open_folder(base)
    head = find_head(files.tensors)
    peft = open_peft(adapter).called_as([*files.tensors, head])
    raw = read_object(base / "config.json") if (base / "config.json").is_file() else {}
    tied = find_tied(files, peft, raw)
    unties = tied is not None and changes_one(peft, tied, head)
    copies = {head: tied} if tied and unties and head not in files.tensors else {}
    files.tensors |= {name: files.tensors[source] for name, source in copies.items()}
    needs_config = quantize != "none" or peft.targets or peft.inputs_first
    config = families.read_config(base, family) if needs_config else None
    corrections = find_corrections(files, peft, config)
    if tied in corrections and not unties and head in files.tensors:
        corrections.setdefault(head, corrections[tied])  # the head is stored a second time
    restore = None if quantize == "none" or config is None else RoundTrip(config, quantize, files)
    loss = RoundingLoss()

    def change(name: str, array: np.ndarray, index: int | None) -> np.ndarray:
        if restore is not None:
            array = restore(name, array, index)
        if name not in corrections:
            return array
        merged = corrections[name].apply(array, index)
        if not np.isfinite(merged).all():
            raise UserError(
                f"{name} with {str(adapter)!r} merged in holds NaN or infinite values: it or the"
                f" tensor of {str(base)!r} does, or their sum does not fit into {merged.dtype}"
            )
        loss.add(merged, dtype or array.dtype, array)
        return merged

    shapes = find_grown(files, peft, corrections)
    if shapes:
        total = next(iter(shapes.values()))[0]
        keys = {**keys, "vocab_size": total}
        if HEAD_BIAS in files.tensors and HEAD_BIAS not in shapes:
            corrections[HEAD_BIAS] = RowCorrection(peft, HEAD_BIAS, (), total)
            shapes[HEAD_BIAS] = (total,)
    if unties:
        keys = {**keys, "tie_word_embeddings": False}
    keys = {**keys, **families.rename_architectures(raw)}
    changes = TensorChanges(change, shapes, copies)
    copy_folder(base, output, dtype, max_shard_bytes, changes, keys)
    copy_tokenizer(Path(adapter), output)
    if "eos_token_id" in keys:
        add_eos(output / GENERATION, keys["eos_token_id"])
    return MergeReport(len(corrections), loss.share)


def find_tied(files: SafetensorsFolder, peft: PeftFolder, raw: Mapping[str, Any]) -> str | None:
    """Return the table that is the base's head, too, if the adapter changes either; else None. raw:
    the base's config.json, which alone says whether a head that is stored is used."""
    changed = {*peft.full(), *(f"{module}.weight" for module in (*peft.modules(), *peft.rows()))}
    tables = [name for name in files.tensors if f".{name}".endswith(EMBEDDINGS)]
    if len(tables) != 1 or changed.isdisjoint({find_head(files.tensors), *tables}):
        return None
    text = raw.get("text_config")
    stated = raw.get("tie_word_embeddings")
    if stated is None and isinstance(text, dict):
        stated = text.get("tie_word_embeddings")
    if stated is None:
        try:
            stated = hf_defaults(str(raw.get("model_type"))).get("tie_word_embeddings", False)
        except UserError:  # a family that transformers does not know
            stated = find_head(files.tensors) not in files.tensors
    return tables[0] if stated else None


def changes_one(peft: PeftFolder, table: str, head: str) -> bool:
    """Return whether an adapter of PEFT changes the table or the head of a tied base and leaves the
    other: PEFT computes with a copy of what it trains. Rows of tokens change in both."""
    full = peft.full() & {table, head}
    if head.removesuffix(".weight") in peft.modules():
        return True
    if len(full) == 2:
        return not _same_tables(peft)
    return bool(full) and not peft.config.get("ensure_weight_tying")


def add_eos(file: Path, eos: int) -> None:
    """Add an end-of-answer token to a generation_config.json."""
    if file.is_file():
        settings = read_object(file)
        stated = settings.get("eos_token_id")
        eos_ids = stated if isinstance(stated, list) else [] if stated is None else [stated]
        settings["eos_token_id"] = list(dict.fromkeys([eos, *eos_ids]))
        file.write_text(json.dumps(settings, indent=2) + "\n")


def find_grown(
    files: SafetensorsFolder, peft: PeftFolder, corrections: Mapping[str, Any]
) -> dict[str, tuple[int, ...]]:
    """Return {table of the base: its shape with the adapter's tokens}. Raises UserError if another
    table has fewer rows."""
    shapes = {}
    for name, correction in corrections.items():
        if isinstance(correction, RowCorrection):
            shapes[name] = (correction.total, *files.tensors[name].shape[1:])
        elif isinstance(correction, Correction) and correction.slot is None:
            shapes[name] = peft.files.tensors[PREFIX + name].shape
    grown = {n: shape for n, shape in shapes.items() if shape != files.tensors[n].shape}
    tables = [name for name in files.tensors if f".{name}".endswith(ENDS)]
    rows = {name: shapes.get(name, files.tensors[name].shape)[0] for name in tables}
    if grown and len(set(rows.values())) > 1:
        counts = ", ".join(f"{name} {count:,}" for name, count in rows.items())
        raise UserError(
            f"{peft.path} adds tokens to some tables of {files.path} and not to others: with it"
            f" they have rows {counts}"
        )
    return grown


def copy_tokenizer(adapter: Path, output: Path) -> None:
    """Replace the base's tokenizer by the adapter's, which may have more tokens and has the chat
    template of the training."""
    if not (adapter / "tokenizer_config.json").is_file():
        return
    for name in TOKENIZER:
        (output / name).unlink(missing_ok=True)
        if (adapter / name).is_file():
            check_inside(adapter, adapter / name)
            shutil.copyfile(adapter / name, output / name)


def find_corrections(
    files: SafetensorsFolder, peft: PeftFolder, config: DecoderConfig | None = None
) -> dict[str, Correction | RowCorrection | ExpertCorrection]:
    """Return {tensor of the base: the adapter's change}. Raises UserError if they do not fit.
    config: the base's, needed if the adapter has pairs for all experts of a layer."""
    corrections: dict[str, Any] = {}
    problems: list[str] = []
    check_orientation(peft, config)
    for module, slot in peft.modules().items():
        name = f"{module}.weight"
        down, up = (peft.files.tensors[f"{PREFIX}{module}.{SUFFIX[p]}"].shape for p in "ab")
        if up[1] != down[0]:
            problems.append(f"{name}: the adapter is {up} x {down}")
        elif check_base_tensor(
            files,
            name,
            (up[0], down[1])[:: -1 if peft.inputs_first else 1],
            problems,
            f"the adapter is {up} x {down}",
        ):
            corrections[name] = Correction(peft, name, slot)
    if config is not None and peft.targets:
        corrections |= find_expert_corrections(files, peft, config, problems)
    for module, ids in peft.rows().items():
        name = f"{module}.weight"
        stored = files.tensors.get(name)
        adapter_shape = peft.files.tensors[f"{PREFIX}{module}.{ROWS}"].shape
        if stored is None:
            problems.append(f"the base has no {name} (a head that it ties to the embedding?)")
        elif stored.shape[1:] != adapter_shape[1:] or not is_float(stored.dtype):
            problems.append(f"{name} is {stored.shape}, the adapter's rows are {adapter_shape}")
        else:
            total, below = max(stored.shape[0], max(ids) + 1), f"{module}.{BELOW}"
            if added_rows := peft.files.tensors.get(PREFIX + below):
                total = max(total, added_rows.shape[0])
            tensor = f"{module}.{ROWS}"
            corrections[name] = RowCorrection(
                peft, tensor, ids, total, below if added_rows else None
            )
    for name in sorted(peft.full()):
        stored, adapter_shape = files.tensors.get(name), peft.files.tensors[PREFIX + name]
        if stored is None and name in HEADS and _same_tables(peft):
            continue  # tied: the base stores the table once, as the embedding
        if stored is None and name.startswith("score."):
            problems.append(
                f"the adapter holds {name}, the head of a reward model, and the base is a language"
                " model; load both with PEFT as a classifier and use its merge_and_unload, or score"
                " with the adapter as it is (jaxtrain score)"
            )
        elif stored is None:
            problems.append(f"the base has no {name} (a head that it ties to the embedding?)")
        elif stored.shape != adapter_shape.shape and not grows(
            name, stored.shape, adapter_shape.shape
        ):
            problems.append(f"{name} is {stored.shape}, the adapter's is {adapter_shape.shape}")
        else:
            corrections[name] = Correction(peft, name, None)
    if not problems and not corrections:
        problems.append("the adapter holds nothing")
    if problems:
        added_rows = f"; and {len(problems) - 4} more" if len(problems) > 4 else ""
        raise UserError(
            f"{peft.path} cannot be merged into {files.path}: {'; '.join(problems[:4])}{added_rows}"
        )
    return corrections


def find_expert_corrections(
    files: SafetensorsFolder, peft: PeftFolder, config: DecoderConfig, problems: list[str]
) -> dict[str, ExpertCorrection]:
    """Return the changes by pairs for all experts of a layer; mismatches are appended to
    `problems`."""
    linears = find_adaptable(config)
    wrapped, targets, unmatched = find_pairs(peft, config, linears)
    problems += [f"the base has no experts for {spell(module)}" for module in sorted(unmatched)]
    ops = {entry.param: entry.op for entry in families.family(config).names(config)}
    corrections = {}
    for path, experts in wrapped.items():
        *_, inputs, outputs = linears[path].shape
        layers = ops[f"{path}.kernel"].ops
        for layer, slot in enumerate(peft.pair_slots(experts, targets)):
            if slot is None:
                continue
            module, count = experts.module(layer, targets), experts.num_experts
            shapes = [peft.files.tensors[f"{PREFIX}{module}.{SUFFIX[p]}"].shape for p in "ab"]
            width, height = (inputs, experts.total)[:: -1 if experts.swapped else 1]
            if shapes != [(count * slot.rank, width), (height, slot.rank * count)]:
                problems.append(f"{module} has a pair {shapes[0]}, {shapes[1]} of another model")
                continue
            common = ExpertCorrection(peft, module, slot, count)
            reason = "the adapter is of another model"
            if not experts.alone:
                leaf = innermost(layers[layer])
                flat = not isinstance(layers[layer], Transpose)
                shape = (count, inputs, experts.total) if flat else (count, experts.total, inputs)
                if check_base_tensor(files, leaf.name, shape, problems, reason):
                    transposed = flat and not experts.swapped
                    corrections[leaf.name] = dataclasses.replace(common, transposed=transposed)
                continue
            last = experts.start + (outputs - 1) * experts.step + 1
            rows = slice(experts.start, last, experts.step)
            for expert, op in enumerate(layers[layer].ops):
                name = innermost(op).name
                if check_base_tensor(files, name, (outputs, inputs), problems, reason):
                    corrections[name] = dataclasses.replace(common, expert=expert, outputs=rows)
    return corrections


def check_base_tensor(
    files: SafetensorsFolder, name: str, shape: tuple[int, ...], problems: list[str], reason: str
) -> bool:
    """Return whether the base has such a tensor of floats; otherwise append a sentence to
    `problems`."""
    stored = files.tensors.get(name)
    if stored is None:
        problems.append(f"the base has no {name}")
    elif stored.shape != shape:
        problems.append(f"{name} is {stored.shape}, {reason}")
    elif not is_float(stored.dtype):
        problems.append(f"{name} is stored as {CODES[stored.dtype]}, not as floats")
    else:
        return True
    return False


def grows(name: str, shape: tuple[int, ...], adapter_shape: tuple[int, ...]) -> bool:
    """Return whether an adapter's table has more tokens than the base's and the same width."""
    is_table = f".{name}".endswith((*ENDS, f".{HEAD_BIAS}"))
    return is_table and adapter_shape[1:] == shape[1:] and adapter_shape[0] > shape[0]


def _same_tables(peft: PeftFolder) -> bool:
    names = [name for name in peft.files.tensors if name.endswith(ENDS)]
    if len(names) != 2:
        return False
    embed, head = (peft.files.fetch(n, full_index(peft.files.tensors[n].shape)) for n in names)
    return np.array_equal(embed, head)
