"""Section `adapter` against an architecture: which Linears get LoRA, which tables train in full."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxtrain.adapters.fused import NAME as FUSED
from jaxtrain.adapters.fused import find_tensors
from jaxtrain.adapters.peft import adapter_entries, read_adapter
from jaxtrain.adapters.spec import Adapter, LoRASpec, choose_slots, find_adaptable
from jaxtrain.config import AdapterConfig
from jaxtrain.errors import UserError
from jaxtrain.models.naming import score_paths

FIXED_KEYS = {"rank", "alpha", "rslora", "target", "rank_pattern", "alpha_pattern"}
"""Keys of section `adapter` that a folder in adapter.path decides."""


def make_adapter(
    section: AdapterConfig, architecture: Any, new: Sequence[int] = ()
) -> Adapter | None:
    """Return what section `adapter` trains of this architecture; None trains everything. UserError.
    new: ids of tokens whose rows are trained where their table is not."""
    if section.kind == "none":
        return None
    tables = {"embed.embedding"} if section.train_embeddings else set()
    scores = set(score_paths(architecture))
    if section.train_head and not scores:
        tables.add("embed.embedding" if architecture.tie_word_embeddings else "lm_head.embedding")
        tables |= {"lm_head.bias"} if architecture.head_bias else set()
    if section.path is not None:
        return read_folder(section, architecture, new, tables)
    slots = choose_slots(
        find_adaptable(architecture),
        section.targets(),
        LoRASpec(section.rank, section.alpha, section.rslora, section.kind == "dora"),
        section.rank_pattern,
        section.alpha_pattern,
    )
    full = tuple(sorted(tables | scores))
    names = [name for name in list_tables(architecture) if f"{name}.embedding" not in full]
    adapter = Adapter(
        slots,
        full,
        section.dtype,
        dropout=section.dropout or 0.0,
        quantize=section.quantize,
        tensors=find_tensors(architecture) if section.quantize == FUSED else {},
        rows=dict.fromkeys(names, tuple(new)) if new else {},
    )
    adapter_entries(architecture, adapter)  # refuse now what an export could not express
    return adapter


def read_folder(
    section: AdapterConfig, architecture: Any, new: Sequence[int], tables: set[str]
) -> Adapter:
    """Return the adapter of adapter.path; UserError where the section says something else."""
    adapter = read_adapter(str(section.path), architecture, section.dtype)
    dropout = adapter.dropout if section.dropout is None else section.dropout
    if dropout >= 1:
        raise UserError(
            f"adapter.path {section.path!r} has lora_dropout {dropout}, which leaves nothing to"
            " learn from; set adapter.dropout below 1"
        )
    adapter = dataclasses.replace(
        adapter,
        dropout=dropout,
        quantize=section.quantize,
        tensors=find_tensors(architecture) if section.quantize == FUSED else {},
    )
    for name in list_tables(architecture):
        if f"{name}.embedding" not in adapter.full and set(new) - set(adapter.rows.get(name, ())):
            raise UserError(
                f"adapter.path {section.path!r} has no rows for the tokens that section model adds,"
                " and fixes what is trained; leave them out, or merge it (jaxtrain merge) and"
                " train a new adapter on that"
            )
    if any(slot.dora != (section.kind == "dora") for slot in adapter.slots.values()):
        raise UserError(
            f"adapter.kind is {section.kind} but adapter.path {section.path!r} holds"
            f" {'lora' if section.kind == 'dora' else 'dora'}; change adapter.kind"
        )
    fixed = sorted(FIXED_KEYS & set(section.model_dump(exclude_defaults=True)))
    if fixed or not tables <= set(adapter.full):
        raise UserError(
            f"adapter.{(fixed or ['train_embeddings and train_head'])[0]} is fixed by adapter.path"
            f" {section.path!r}; remove it"
        )
    return adapter


def list_tables(architecture: Any) -> list[str]:
    """Return the paths of tables with a row per token: the embedding, and an untied head."""
    untied = not architecture.tie_word_embeddings and architecture.score is None
    return ["embed", "lm_head"] if untied else ["embed"]
