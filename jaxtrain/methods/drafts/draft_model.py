"""The bundles of a draft and its target, checked against each other."""

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

from jaxtrain.adapters.spec import Adapter
from jaxtrain.config import Config
from jaxtrain.core.architecture import find_folder
from jaxtrain.core.bundle import ModelBundle, build_model_bundle
from jaxtrain.distributed.mesh import is_main_process, make_mesh, split_devices
from jaxtrain.errors import UserError
from jaxtrain.methods.drafts.config import DraftConfig as DraftSection
from jaxtrain.methods.drafts.config import DraftTask
from jaxtrain.models import families
from jaxtrain.models.decoder_config import DecoderConfig
from jaxtrain.models.draft import (
    BaseDraftConfig,
    TargetEmbeddingAndHead,
    check_capture,
    check_target,
)


def assemble_target(config: Config) -> ModelBundle:
    """Build the bundle of section `model`, frozen, with the adapter of adapter.path if there is
    one, on the training mesh; see `build_model_bundle`. For `Role(bundle, "own")` or `move_target`.
    """
    assert isinstance(config.task, DraftTask)
    section = config.task.target
    reserved = section.devices if section.source == "ahead" else 0
    bundle = build_model_bundle(config, reserved, key="task.target.devices")
    if section.quantize == "none":
        return bundle
    adapter = bundle.adapter or Adapter({})
    return dataclasses.replace(
        bundle, adapter=dataclasses.replace(adapter, quantize=section.quantize)
    )


def move_target(config: Config, target: ModelBundle) -> ModelBundle:
    """Return the target on the devices that task.target reserves for it, if any."""
    assert isinstance(config.task, DraftTask)
    section = config.task.target
    if section.source != "ahead":
        return target
    devices = split_devices(section.devices, "task.target.devices")[1]
    mesh = make_mesh(devices, fsdp=-1, tensor=section.tensor, expert=section.expert)
    return dataclasses.replace(target, mesh=mesh)


def borrowed_parts(target: ModelBundle) -> ModelBundle:
    """Return the parts that a draft borrows from a target whose layers are elsewhere: embedding,
    final norm, head."""
    adapter = target.adapter
    if adapter is not None:  # tables that it trained, whole or in rows
        trains = adapter.full or adapter.rows
        adapter = dataclasses.replace(adapter, slots={}, quantize="none") if trains else None
    options = {**target.options, "part": TargetEmbeddingAndHead}
    return dataclasses.replace(target, options=options, adapter=adapter)


def assemble_draft(
    section: DraftSection,
    target: ModelBundle,
    family: type[BaseDraftConfig],
    make: Callable[[dict[str, Any]], BaseDraftConfig],
    compute_dtype: str,
    attention_impl: str = "auto",
) -> ModelBundle:
    """Build the bundle of section task.draft on the mesh of its target, from the named folder or
    new. For `Role(bundle, "trained")`.

    family: the Config required of a folder. make: builds the family's config from `draft_sizes`.
    compute_dtype: default for the section. Raises UserError if draft and target do not fit.
    """
    if section.path is None:
        architecture, folder = make(draft_sizes(section, target.architecture)), None
    else:
        folder = find_folder(section.path, weights=True, key="task.draft.path")
        architecture = families.read_config(folder)
        if not isinstance(architecture, family):
            raise UserError(
                f"task.draft.path {section.path!r} holds {architecture.architecture}; needed is a"
                f" draft of architecture {family.architecture}"
            )
    check_target(architecture, target.architecture)
    spoken = architecture.mask_token_id
    if folder is None and spoken is not None and spoken < len(target.tokenizer):
        name = target.tokenizer.convert_ids_to_tokens(spoken)
        if is_main_process() and spoken not in target.tokenizer.all_special_ids:
            print(
                f"warning: task.draft.mask_token_id {spoken} is {name!r}, which texts may hold",
                file=sys.stderr,
                flush=True,
            )
    return dataclasses.replace(
        target,
        architecture=architecture,
        folder=folder,
        options={
            "param_dtype": section.param_dtype,
            "dtype": section.compute_dtype or compute_dtype,
            "remat": section.remat,
            "scan_layers": section.scan_layers,
            "attention_impl": attention_impl,
        },
        adapter=None,
    )


def draft_sizes(section: DraftSection, target: DecoderConfig) -> dict[str, Any]:
    """Return keyword arguments of DecoderConfig for a new draft: the section's sizes, else the
    target's. The number of layers is missing if the section leaves it out."""
    heads = section.num_attention_heads or target.num_attention_heads
    kv_heads = section.num_key_value_heads or target.num_key_value_heads
    if heads % kv_heads:
        raise UserError(
            f"task.draft.num_attention_heads {heads} must be a multiple of"
            f" task.draft.num_key_value_heads {kv_heads}"
        )
    head_dim = section.head_dim or target.head_size
    if head_dim % 2:
        raise UserError(f"task.draft.head_dim {head_dim} must be even for rotation")
    sizes = {
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "intermediate_size": section.intermediate_size or target.intermediate_size,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": target.max_position_embeddings,
        "initializer_range": target.initializer_range,
        "rms_norm_eps": target.rms_norm_eps,
        "tie_word_embeddings": False,
        "rope": tuple(item for item in target.rope if item[0] != "partial_rotary_factor"),
        "carried_attributes": target.carried_attributes,
        "target_hidden_size": target.hidden_size,
        "num_target_layers": target.num_hidden_layers,
    }
    if section.num_layers is not None:
        sizes["num_hidden_layers"] = section.num_layers
    if section.target_layers is not None:
        sizes["capture"] = tuple(section.target_layers)
        check_capture(sizes["capture"], target.num_hidden_layers)
    return sizes


def find_mask_token(section: DraftSection, tokenizer: Any, vocab_size: int) -> int:
    """Choose the token that replaces guessed ones. Raises UserError if there is no candidate."""
    if section.mask_token_id is not None:
        return section.mask_token_id
    mask_token = getattr(tokenizer, "mask_token_id", None)
    if mask_token is not None:
        return int(mask_token)
    if len(tokenizer) < vocab_size:
        return len(tokenizer)
    pad, eos = tokenizer.pad_token_id, tokenizer.eos_token_id
    if pad is not None and pad != eos:
        return int(pad)
    raise UserError(
        f"the tokenizer uses all {vocab_size} rows of the embedding and has neither a mask nor a"
        " pad token of its own; set task.draft.mask_token_id to a token that texts do not hold"
    )
