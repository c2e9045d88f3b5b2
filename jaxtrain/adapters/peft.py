"""PEFT's adapter folders: adapter_config.json and adapter_model.safetensors, out and in.

Tensor names are the base model's, with the prefix `base_model.model.`: `<module>.lora_A.weight`
[R, in], `<module>.lora_B.weight` [out, R], `<module>.lora_magnitude_vector` [out] for DoRA, and
`<tensor>` itself for what is trained in full (`modules_to_save`), `<module>.token_adapter.
trainable_tokens_delta` for rows of a table (`trainable_token_indices`). PEFT loads them all, vLLM
those of Linears.

Where several matrices here are rows of one there (`in_proj_qkvz` of Qwen3-Next), their pairs are
one pair: the factors A below each other, B in blocks, zero elsewhere; rank and alpha grow with
their number. Read from a folder, each has the whole A, and its own rows of B.
"""

import collections
import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxtrain.adapters.peft_config import describe_adapter, short_name
from jaxtrain.adapters.peft_experts import (
    ExpertsA,
    ExpertsB,
    Outputs,
    WrappedExperts,
    find_targets,
    find_wrapped,
    innermost,
)
from jaxtrain.adapters.peft_folder import (
    BELOW,
    CONFIG,
    PREFIX,
    ROWS,
    SUFFIX,
    TOWER,
    WEIGHTS,
    PeftFolder,
    check_orientation,
    lies_beside,
    module_in_memory,
    open_peft,
)
from jaxtrain.adapters.spec import (
    ROUTER,
    Adapter,
    Linears,
    choose_layers,
    find_adaptable,
    find_linears,
)
from jaxtrain.distributed.feed import to_host
from jaxtrain.distributed.mesh import is_main_process, sync_processes
from jaxtrain.errors import UserError
from jaxtrain.huggingface.files import spell
from jaxtrain.huggingface.ops import (
    MatrixBlock,
    ParameterEntry,
    PermutedRows,
    SplitRows,
    StackedOps,
    TensorOp,
    TensorRef,
    Transpose,
)
from jaxtrain.huggingface.safetensors import write_folder
from jaxtrain.models.decoder_config import DecoderConfig
from jaxtrain.models.families import family
from jaxtrain.models.finite import FiniteCheck
from jaxtrain.models.loading import read_checked
from jaxtrain.models.naming import score_paths
from jaxtrain.models.parameters import Params, Shapes


class PairSelection(NamedTuple):
    """The position of a pair among those that PEFT stores as one."""

    index: int
    count: int
    rank: int


def adapter_entries(
    config: DecoderConfig, adapter: Adapter, *, reading: PeftFolder | None = None
) -> list[ParameterEntry]:
    """List every trained parameter with its tensors of a PEFT folder. reading: the folder to read,
    which has the ranks of `adapter`; None: a folder to be written."""
    base = {entry.param: entry.op for entry in family(config).names(config)}
    entries, selections = [], find_joint(config, adapter) if reading is None else {}
    wrapped = wrapped_slots(config, adapter)
    targets = targets_of(wrapped) if reading is None else find_targets(reading.targets, wrapped)
    for path, slot in adapter.slots.items():
        kernel, experts = base[f"{path}.kernel"], wrapped.get(path)
        if slot.layers is not None:
            assert isinstance(kernel, StackedOps), f"{path} is not stacked"
            kernel = StackedOps(tuple(kernel.ops[layer] for layer in slot.layers))
        if experts is not None and experts.target in targets:
            selection = selections.get(path) or PairSelection(0, 1, slot.rank)
            start, ranks = selection.index * selection.rank, selection.count * selection.rank
            for part in ("a", "b"):
                op = pair_op(experts, part, targets, start, ranks, slot.layers)
                entries.append(ParameterEntry(f"{path}.adapter.{part}", op))
            continue
        if path.endswith(".router") and ".block_sparse_moe." in innermost(kernel).name:
            raise _without_form(innermost(kernel))  # transformers 5 calls it otherwise
        if ".experts." in path and not isinstance(getattr(kernel, "ops", [None])[0], StackedOps):
            raise _without_form(innermost(kernel))
        for name in SUFFIX if slot.dora else ("a", "b"):
            op = _adapted(_outputs_first(kernel), name, selections.get(path))
            entries.append(ParameterEntry(f"{path}.adapter.{name}", op))
    for path in adapter.rows:
        table = base[f"{path}.embedding"]
        assert isinstance(table, TensorRef), f"{path} is not one tensor"
        name = f"{PREFIX}{table.name.removesuffix('weight')}{ROWS}"
        entries.append(ParameterEntry(f"{path}.adapter.rows", TensorRef(name)))
    for path in adapter.full:
        tensor = base[path]
        assert isinstance(tensor, TensorRef), f"{path} is not one tensor"
        entries.append(ParameterEntry(path, TensorRef(PREFIX + tensor.name)))
    if config.tie_word_embeddings and "embed.embedding" in adapter.full:
        # PEFT unties a table that it saves; with both copies it computes what the tied model does.
        entries.append(ParameterEntry("embed.embedding", TensorRef(f"{PREFIX}lm_head.weight")))
    return entries


def find_joint(config: DecoderConfig, adapter: Adapter) -> dict[str, PairSelection]:
    """Return the adapted Linears that are rows of a larger tensor, with their positions in its one
    pair. Raises UserError if there can be no such pair."""
    groups: dict[str, list[str]] = collections.defaultdict(list)
    rows = {}
    for path, experts in wrapped_slots(config, adapter).items():
        if not experts.alone:
            groups[experts.parameters[0]].append(path)
    for entry in family(config).names(config):
        path, op = entry.param.removesuffix(".kernel"), innermost(entry.op)
        if path in adapter.slots and isinstance(op, PermutedRows) and _count(op) < op.total:
            groups[op.name].append(path)
            rows[path] = op
    for name, paths in groups.items():
        slots = [adapter.slots[path] for path in paths]
        total = rows[paths[0]].total if paths[0] in rows else 0
        partial = sum(_count(rows[path]) for path in paths if path in rows) < total
        if len(set(slots)) > 1 or (slots[0].dora and partial):
            module = name.removesuffix(".weight").rpartition(".")[2]
            raise UserError(
                f"adapter: {', '.join(paths)} belong to one matrix in PEFT, {module}; give them"
                " the same rank and alpha, in the same layers"
                + (", and adapter.target all parts of it, as DoRA needs" if partial else "")
            )
    return {
        path: PairSelection(index, len(paths), adapter.slots[path].rank)
        for paths in groups.values()
        for index, path in enumerate(paths)
    }


def is_parameter(module: str) -> bool:
    """Return whether a router's module has its matrix as a bare parameter in transformers 5, which
    PEFT adapts by target_parameters, and not in a Linear within it."""
    *_, parent, leaf = module.split(".")
    return leaf in ("gate", "router") and parent not in ("gate", "router")


def wrapped_slots(config: DecoderConfig, adapter: Adapter) -> dict[str, WrappedExperts]:
    """Return the adapted matrices of experts by path."""
    if not any(".experts." in path for path in adapter.slots):
        return {}
    wrapped = find_wrapped(config, find_linears(config))
    return {path: experts for path, experts in wrapped.items() if path in adapter.slots}


def targets_of(wrapped: Mapping[str, WrappedExperts]) -> set[str]:
    """Return the target_parameters of a folder to be written: if the base has a tensor for each
    expert, each expert has a pair of its own instead."""
    return {experts.target for experts in wrapped.values() if not experts.alone}


def pair_op(
    experts: WrappedExperts,
    part: str,
    targets: set[str],
    start: int,
    ranks: int,
    layers: Sequence[int] | None = None,
) -> TensorOp:
    """Return the op of one factor of a matrix of experts in the pairs of its layers, or of some;
    see `PairSelection`."""
    stored = {"a": "b", "b": "a"}[part] if experts.swapped else part
    kind = ExpertsA if stored == "a" else ExpertsB
    outputs = Outputs(experts.start, experts.step, experts.total) if part == "b" else None
    ops: list[TensorOp] = []
    for layer in range(len(experts.parameters)) if layers is None else layers:
        name = f"{PREFIX}{experts.module(layer, targets)}.{SUFFIX[stored]}"
        op = kind(name, start, ranks, experts.num_experts, outputs)
        ops.append(Transpose(op) if experts.swapped else op)
    return StackedOps(tuple(ops))


def _count(op: PermutedRows) -> int:
    return sum(size for _, size in op.runs)


def write_peft(
    params: Params,
    config: DecoderConfig,
    adapter: Adapter,
    folder: str | os.PathLike,
    base_name: str | None,
    dtype: str | None = None,
) -> None:
    """Write the trained parameters as a PEFT folder, in `dtype` or their own.

    Every process takes part; the first one writes.
    """
    if is_main_process():
        write_gathered(params, config, adapter, folder, base_name, dtype)
    else:
        entries = adapter_entries(config, adapter)
        pieces = (piece for e in entries for piece in e.op.write(params[e.param], to_host))
        collections.deque(pieces, maxlen=0)  # takes part in the gathers
    sync_processes("write_peft")


def write_gathered(
    params: Mapping[str, Any],
    config: DecoderConfig,
    adapter: Adapter,
    folder: str | os.PathLike,
    base_name: str | None,
    dtype: str | None = None,
) -> None:
    """Write the folder of `write_peft` from one process; the parameters may be numpy arrays."""
    entries, linears = adapter_entries(config, adapter), find_adaptable(config)
    beside = lies_beside(module_names(linears))
    plan = {}
    for entry in entries:
        value = params[entry.param]
        for name, shape in entry.op.shapes(value.shape).items():
            plan[_rename(name, beside)] = (shape, np.dtype(dtype or value.dtype))
    pieces = (
        piece._replace(name=_rename(piece.name, beside))
        for entry in entries
        for piece in entry.op.write(params[entry.param], to_host)
    )
    write_folder(folder, dict(sorted(plan.items())), pieces, 1 << 60, single=WEIGHTS)
    wrapped = wrapped_slots(config, adapter)
    targets = {
        path: [experts.target]
        if (layers := adapter.slots[path].layers) is None
        else [experts.parameters[layer] for layer in layers]
        for path, experts in wrapped.items()
        if not experts.alone
    }
    for path, slot in adapter.slots.items():
        if linears[path].preset == ROUTER and is_parameter(name := linears[path].modules[0]):
            modules = [linears[path].modules[layer] for layer in slot.layers or ()]
            modules = modules or [".".join(name.split(".")[-2:])]
            targets[path] = [f"{module}.weight" for module in modules]
    tables = {path: module_in_memory(name) for path, name in table_modules(config).items()}
    raw = describe_adapter(linears, join_slots(config, adapter), base_name, targets, tables)
    raw["fan_in_fan_out"] = config.inputs_first
    # PEFT renames tensors as transformers does, but not the modules to put pairs at. Only models
    # with a tensor for each expert need an expression, and none of their names differs.
    if isinstance(raw["target_modules"], list):
        raw["target_modules"] = [
            name
            for module in raw["target_modules"]
            for name in _names_in_memory(config, module, beside)
        ]
    for key in ("rank_pattern", "alpha_pattern"):
        raw[key] = {
            name: value
            for module, value in raw[key].items()
            for name in _names_in_memory(config, module, beside)
        }
    if f"{PREFIX}lm_head.weight" in plan:
        raw["modules_to_save"] = sorted({*(raw["modules_to_save"] or ()), "lm_head"})
    if adapter.rows:
        raw["trainable_token_indices"] = {
            tables[path].rpartition(".")[2]: list(ids) for path, ids in adapter.rows.items()
        }
    (Path(folder) / CONFIG).write_text(json.dumps(raw, indent=2) + "\n")


def table_modules(config: DecoderConfig) -> dict[str, str]:
    """Return the Hugging Face modules of the tables with a row per token: {"embed":
    "model.embed_tokens", ...}."""
    base = {entry.param: entry.op for entry in family(config).names(config)}
    tables = {path: base.get(f"{path}.embedding") for path in ("embed", "lm_head")}
    return {
        path: op.name.removesuffix(".weight")
        for path, op in tables.items()
        if isinstance(op, TensorRef)
    }


def join_slots(config: DecoderConfig, adapter: Adapter) -> Adapter:
    """Return the adapter with the ranks and alphas of PEFT's pairs; scales stay."""
    slots = dict(adapter.slots)
    for path, selection in find_joint(config, adapter).items():
        slot = slots[path]
        factor = math.sqrt(selection.count) if slot.rslora else selection.count
        slots[path] = dataclasses.replace(
            slot, rank=slot.rank * selection.count, alpha=slot.alpha * factor
        )
    return dataclasses.replace(adapter, slots=slots)


def read_adapter(folder: str | os.PathLike, config: DecoderConfig, dtype: str) -> Adapter:
    """Describe an existing adapter of a model. Raises UserError if it does not fit."""
    linears = find_adaptable(config)
    peft = open_peft(folder).called_as(list_modules(config, linears))
    check_orientation(peft, config)
    modules, slots = peft.modules(), {}
    wrapped, targets, unmatched = find_pairs(peft, config, linears)
    unmatched |= set(modules)
    for path, linear in linears.items():
        if path in wrapped:
            layer_slots = peft.pair_slots(wrapped[path], targets)
        else:
            layer_slots = [modules.get(name) for name in linear.modules]
            unmatched -= {*linear.modules}
        if not any(layer_slots):
            continue
        layers = len(linear.by_layer())
        count = len(layer_slots) // layers
        by_layer = [set(layer_slots[i * count : (i + 1) * count]) for i in range(layers)]
        adapted = set().union(*by_layer) - {None}
        if len(adapted) > 1 or any(len(slots_of) > 1 for slots_of in by_layer):
            kinds = "several ranks or alphas" if len(adapted) > 1 else "it in some experts only"
            raise UserError(
                f"adapter.path {str(folder)!r}: {short_name(linears, path)} has {kinds}; layers and"
                " experts are stored stacked and must be alike. Merge it instead: jaxtrain merge"
            )
        present = choose_layers([None not in slots_of for slots_of in by_layer])
        slot = next(slot for slot in layer_slots if slot is not None)
        slots[path] = dataclasses.replace(slot, layers=present)
    homes = {module: path for path, module in table_modules(config).items()}
    tables = {f"{module}.weight": f"{path}.embedding" for module, path in homes.items()}
    if config.tie_word_embeddings:
        tables["lm_head.weight"] = "embed.embedding"
    if config.head_bias:
        tables["lm_head.bias"] = "lm_head.bias"
    scores = score_paths(config)
    tables |= {name: name for name in scores}
    if not set(scores) <= peft.full():
        raise UserError(
            f"adapter.path {str(folder)!r} is a language model's, it holds no {scores[0]}; merge it"
            " into its base (jaxtrain merge) and start from that folder"
        )
    rows, named = {}, peft.rows()
    stored = config.vocab_size - config.grown
    for module in homes.keys() & named.keys():
        rows[homes[module]] = named.pop(module)
        below = peft.files.tensors.get(f"{PREFIX}{module}.{BELOW}")
        if below is not None and set(range(stored, below.shape[0])) - set(rows[homes[module]]):
            raise UserError(
                f"adapter.path {str(folder)!r} brings a table for {module} with more rows than the"
                " base has and it trains; merge it instead: jaxtrain merge"
            )
        if max(rows[homes[module]]) >= config.vocab_size:
            raise UserError(
                f"adapter.path {str(folder)!r} has rows for token {max(rows[homes[module]])}, the"
                f" model has {config.vocab_size}: name the tokens that it was trained with in"
                " model.added_tokens or model.special_tokens"
            )
    unknown = sorted([*unmatched, *named, *(peft.full() - set(tables))])
    if unknown or not slots:
        raise UserError(
            f"adapter.path {str(folder)!r} does not fit {config.architecture}: "
            + (f"unknown modules {', '.join(unknown[:4])}" if unknown else "no adapted module")
        )
    full = tuple(sorted({tables[name] for name in peft.full()}))
    dropout = float(peft.config.get("lora_dropout") or 0)
    return Adapter(slots, full, dtype, source=Path(folder), dropout=dropout, rows=rows)


def list_modules(config: DecoderConfig, linears: Linears) -> list[str]:
    """List the Hugging Face modules of all Linears and tables."""
    return [*module_names(linears), *table_modules(config).values()]


def module_names(linears: Linears) -> list[str]:
    """List the Hugging Face modules of all Linears."""
    return [name for linear in linears.values() for name in linear.modules]


def find_pairs(
    peft: PeftFolder, config: DecoderConfig, linears: Linears
) -> tuple[dict[str, WrappedExperts], set[str], set[str]]:
    """Return (matrices of experts that target_parameters names, by path; their targets; modules
    with pairs that belong to none of them). Raises UserError for a name that is no parameter of
    experts."""
    if not peft.targets:
        return {}, set(), set()
    every = find_wrapped(config, linears)
    targets = find_targets(peft.targets, every)
    if strange := [name for name in peft.targets if not find_targets([name], every)]:
        available = sorted({experts.target for experts in every.values()})
        raise UserError(
            f"{peft.path / CONFIG}: target_parameters names {spell(strange[0])}, which"
            f" {config.architecture} does not have; it has {', '.join(available) or 'no experts'}"
        )
    wrapped = {path: experts for path, experts in every.items() if experts.target in targets}
    used = {
        experts.module(layer, targets)
        for experts in wrapped.values()
        for layer in range(len(experts.parameters))
    }
    return wrapped, targets, peft.pairs() - used


def load_trained(shapes: Shapes, config: DecoderConfig, adapter: Adapter) -> Params:
    """The trained parameters of adapter.source, as shapes (with shardings) ask."""
    assert adapter.source is not None, "an adapter that starts from a folder"
    file = adapter.source / WEIGHTS
    peft = open_peft(adapter.source).called_as(list_modules(config, find_adaptable(config)))
    params: dict[str, Any] = {}
    files = peft.files
    check = FiniteCheck(files)
    for param, op in adapter_entries(config, adapter, reading=peft):
        spec = shapes[param]
        for name, shape in op.shapes(spec.shape).items():
            stored = files.tensors.get(name)
            if stored is None or stored.shape != shape:
                actual = "missing" if stored is None else stored.shape
                raise UserError(f"{file}: {name} is {actual}, this model needs {shape}")
        value = read_checked(files, ParameterEntry(param, op), spec, spec.sharding, check)
        if param in params and not np.array_equal(to_host(params[param]), to_host(value)):
            raise UserError(f"{file}: embedding and head differ, but the model ties them")
        params[param] = value
    check.close()
    return params


def _outputs_first(op: TensorOp) -> TensorOp:
    """The op of a kernel as if its tensors had outputs before inputs, as PEFT's factors have even
    beside GPT-2's, which have not."""
    if isinstance(op, StackedOps):
        return StackedOps(tuple(map(_outputs_first, op.ops)))
    if isinstance(op, Transpose):
        return op
    return Transpose(dataclasses.replace(op, axis=0) if isinstance(op, PermutedRows) else op)


def _adapted(op: TensorOp, name: str, selection: PairSelection | None) -> TensorOp:
    """The op of a kernel turned to one part of its adapter."""
    match op:
        case StackedOps():
            return StackedOps(tuple(_adapted(layer_op, name, selection) for layer_op in op.ops))
        case Transpose():
            inner = _adapted(op.op, name, selection)
            return inner if name == "magnitude" else Transpose(inner)
        case TensorRef():
            return TensorRef(_peft_name(op.name, name))
        case PermutedRows():
            renamed = _peft_name(op.name, name)
            if selection is not None and name != "magnitude":
                start, all_ranks = (
                    selection.index * selection.rank,
                    selection.count * selection.rank,
                )
                if name == "a":
                    return SplitRows(renamed, 0, start, all_ranks)
                return MatrixBlock(renamed, op.runs, op.total, start, all_ranks)
            # The factor a knows no rows.
            return TensorRef(renamed) if name == "a" else dataclasses.replace(op, name=renamed)
    raise _without_form(op)


def _without_form(op: Any) -> UserError:
    return UserError(
        f"adapter.target chooses {op.name}, one tensor of several matrices in this folder or a"
        " router that transformers calls otherwise; PEFT's form of such adapters is not known here."
        ' Leave it out, as adapter.target "attention" does'
    )


def _names_in_memory(config: DecoderConfig, module: str, beside: bool) -> list[str]:
    """Return the names in PEFT of a module of a folder; two where only one of several modules with
    that last name is renamed."""
    *owner, name = module_in_memory(module, beside).split(".")
    last = [name, *filter(None, [config.modules_in_memory.get(name)])]
    return [".".join((*owner, part)) for part in last]


def _rename(name: str, beside: bool) -> str:
    """Return PEFT's name of a folder's tensor: another one where PEFT does not rename it itself."""
    module = name.removeprefix(PREFIX)
    renamed = beside or TOWER.match(module) or module.startswith("embed_out.")
    return PREFIX + module_in_memory(module, beside) if renamed else name


def _peft_name(tensor: str, part: str) -> str:
    return f"{PREFIX}{tensor.removesuffix('weight')}{SUFFIX[part]}"
