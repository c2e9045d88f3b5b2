"""Draft models for the sampler: loaded from a folder and checked against the target, or copied from
the draft that a run trains."""

from collections.abc import Callable
from typing import Any

import jax

from jaxtrain.core.architecture import find_folder
from jaxtrain.core.bundle import ModelBundle
from jaxtrain.core.roles import ModelSnapshot
from jaxtrain.errors import UserError
from jaxtrain.generation.local.slots import unstack
from jaxtrain.generation.local.weights import Copier
from jaxtrain.huggingface.packed import open_folder
from jaxtrain.models import build, families, loading
from jaxtrain.models.capabilities import require_trials
from jaxtrain.models.decoder_config import DecoderConfig
from jaxtrain.models.draft import BaseDraftConfig, Draft, check_target
from jaxtrain.models.parameters import Params, split_model


def check_draft(name: str, target: ModelBundle, key: str) -> None:
    """Raise UserError unless the draft folder or Hub id `name` fits this target, or, for "mtp", the
    target has a head; reads no weights. key: the option that names it."""
    if name == "mtp":
        find_head(target, key)
        return
    folder = find_folder(name, weights=True, key=key)
    if (folder / "checkpoints").is_dir():
        raise UserError(
            f"{key} {name!r} is a run; name the draft folder that it wrote at its end, or write one"
            f" with `jaxtrain export {name}`"
        )
    architecture = families.read_config(folder)
    if not isinstance(architecture, BaseDraftConfig):
        raise UserError(
            f"{key} {name!r} holds {architecture.architecture}, which is no draft; name a folder"
            ' that task.kind "dflash" or "eagle3" wrote'
        )
    check_target(architecture, target.architecture, key)
    require_trials(build.abstract(target.architecture), key)


def open_draft(
    name: str, target: ModelBundle, mesh: jax.sharding.Mesh, key: str, model: Any = None
) -> Draft:
    """Load the draft on `mesh`, in the target's compute dtype; UserError as check_draft. "mtp": the
    target's multi-token prediction head, that of `model` if it has one."""
    if name == "mtp":
        with jax.set_mesh(mesh):
            return unstack(open_head(target, mesh, key, model))
    check_draft(name, target, key)
    dtype = target.options["dtype"]
    draft = loading.load(
        find_folder(name, weights=True, key=key), mesh, param_dtype=dtype, dtype=dtype
    )
    assert isinstance(draft, Draft)
    with jax.set_mesh(mesh):
        return unstack(draft)


def open_head(target: ModelBundle, mesh: jax.sharding.Mesh, key: str, model: Any) -> Draft:
    """Return the head of `model`, else that of the target's folder, as a draft; UserError where
    there is none."""
    from jaxtrain.models.mtp import HeadDraft, HeadPart

    config, folder = find_head(target, key), target.folder
    if target.architecture.mtp is not None:
        return HeadDraft(model.mtp, config.num_hidden_layers)
    assert folder is not None, "find_head has seen the head there"
    options = {"param_dtype": target.options["dtype"], "dtype": target.options["dtype"]}
    part = build.abstract(config, HeadPart, **options)
    params = dict(loading.read_params(folder, mesh, config, part=HeadPart, **options))
    return HeadDraft(split_model(part)[1](params).mtp, config.num_hidden_layers)


def find_head(target: ModelBundle, key: str) -> DecoderConfig:
    """Return the target's config with the multi-token prediction head that is a part of it or lies
    in its folder; UserError where there is none."""
    from jaxtrain.models.mtp import with_head

    config, folder = target.architecture, target.folder
    require_trials(build.abstract(config), key)
    if config.mtp is not None:
        return config
    config = with_head(config, {} if folder is None else open_folder(folder).tensors, key)
    if folder is None or config.mtp.drawn:
        raise UserError(
            f"{key} mtp: the model's folder has no multi-token prediction head; train one with"
            " model.mtp.train, or name the folder of a draft"
        )
    return config


def renew_draft(draft: Draft, model: Any) -> Draft:
    """Return the draft beside newer weights of its target: a head that is a part of `model` is
    replaced by the newer one."""
    from jaxtrain.models.mtp import HeadDraft

    head = getattr(model, "mtp", None)
    if not isinstance(draft, HeadDraft) or head is None:
        return draft
    return unstack(HeadDraft(head, draft.capture[0] + 1))


def make_draft_copier(mesh: jax.sharding.Mesh) -> Callable[[ModelSnapshot], Params]:
    """Return a function that copies the weights of a trained draft to the sampler's `mesh`, like
    `weights.Copier`, which it creates with the first draft."""
    copiers: list[Copier] = []

    def copy(draft: ModelSnapshot) -> Params:
        if not copiers:
            copiers.append(Copier(draft.roles.bundle, mesh))
        return copiers[0](draft.params())

    return copy
