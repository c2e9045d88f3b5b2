"""From a config.json to the family and the config of a model."""

import dataclasses
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxtrain import plugins
from jaxtrain.errors import UserError
from jaxtrain.huggingface.config_checks import check_names
from jaxtrain.huggingface.files import read_object, spell
from jaxtrain.models import ARCHITECTURES, DRAFTS, TEXTS
from jaxtrain.models.decoder_config import DecoderConfig
from jaxtrain.models.scores import (
    CLASSIFIERS,
    LANGUAGE,
    PICTURED,
    ScoreHead,
    read_score_head,
    split_architecture,
)

BASE, CAUSAL = "Model", LANGUAGE


def resolve_architecture(name: str) -> str:
    """Return the name that a family here goes by: of an old spelling (LLaMAForCausalLM), of a model
    without its head (LlamaModel), of a class that torch's fully_shard renamed (FSDPLlama...), and
    by its text's class, of a model whose class has another ending around a tower."""
    built_in = {**ARCHITECTURES, **DRAFTS}
    plain = name.removeprefix("FSDP")
    if name in built_in or any(entry.name == name for entry in plugins.list_entry_points("models")):
        return name
    by_spelling = {architecture.lower(): architecture for architecture in ARCHITECTURES}
    candidates = (
        plain,
        plain.removesuffix("Text" + BASE) + CAUSAL,
        plain.removesuffix(BASE) + CAUSAL,
        plain.removesuffix(CAUSAL) + PICTURED,
    )
    fitting = (by_spelling[c.lower()] for c in candidates if c.lower() in by_spelling)
    return next(fitting, name)


def rename_architectures(raw: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return {"architectures": the names of today} for a config.json that has others, else {}."""
    named = check_names(raw)[0]
    renamed = [resolve_architecture(name) for name in named]
    return {} if renamed == named else {"architectures": renamed}


def warn_unread(config: DecoderConfig, key: str = "model.path") -> None:
    """Print one line with the attributes of config.json that nothing reads and that say something:
    not null, false or empty, and not of GenerationConfig. key: what names the folder."""
    if not config.unread_attributes:
        return
    from transformers import GenerationConfig  # seconds: only here

    generation, empty = GenerationConfig().to_dict(), ("null", "false", "[]", "{}")
    named = [
        spell(name)
        for name, value in config.unread_attributes
        if name not in generation and value not in empty
    ]
    if named:
        print(
            f"{key}: config.json has {', '.join(named)}, which transformers does not know for this"
            " model_type; ignored, and kept for exports",
            file=sys.stderr,
            flush=True,
        )


def family(config: DecoderConfig) -> ModuleType:
    """Return the module that defines the config's class, with its Model and names()."""
    return sys.modules[type(config).__module__]


def find_family(architecture: str, text: Any = None) -> ModuleType:
    """Return the module of an architecture, built in or from an entry point. Raises UserError
    listing all of them. text: the content of text_config, which may select the family."""
    key, advice = "config.json: architectures", "set model.family to the module that holds it"
    modules = {**ARCHITECTURES, **DRAFTS}
    kind = text.get("model_type") if isinstance(text, Mapping) else None
    if isinstance(kind, str) and (architecture, kind) in TEXTS:
        modules[architecture] = TEXTS[architecture, kind]
    return plugins.find("models", architecture, modules, key=key, modules=True, instead=advice)


def config_from_hf(
    raw: Mapping[str, Any],
    family_module: str | None = None,
    folder: str | os.PathLike | None = None,
) -> DecoderConfig:
    """Return the config of the family that a config.json names by `architectures`, else by
    `model_type`; with a score head if the architecture is one of models.scores.

    family_module: "package.module" or "file.py" that holds the family, as in model.family. folder:
    the folder of the config.json, whose tensors may decide how parameters are named.
    """
    named, model_type = check_names(raw)
    base, per = split_architecture(named[0]) if named else (None, None)
    if family_module is not None:
        module = plugins.load_module(family_module, key=f"model.family {family_module!r}")
    elif base is not None:
        base = resolve_architecture(base)
        module = find_family(base, raw.get("text_config"))
    else:
        architectures = [
            *ARCHITECTURES,
            *(entry.name for entry in plugins.list_entry_points("models")),
        ]
        # A text's own family before those that have other parts around it.
        fitting = (
            candidate
            for key in ("model_type", "text_type")
            for candidate in map(find_family, architectures)
            if getattr(candidate.Config, key, None) == model_type
        )
        module = None if model_type is None else next(fitting, None)
        if module is None:
            raise UserError(
                f"config.json: no architectures, and model_type={model_type!r} is that of none of"
                f" {', '.join(architectures)}; name one of them, or set model.family"
            )
    from jaxtrain.huggingface.packed import holds_weights, open_folder, without_packing

    config = check_family(module, base).from_hf(without_packing(raw))
    fits = type(config).fit is not DecoderConfig.fit
    if folder is not None and fits and holds_weights(Path(folder)):
        config = config.fit(open_folder(folder).tensors)
    return config if per is None else with_score(config, read_score_head(raw, per))


def with_score(config: DecoderConfig, score: ScoreHead) -> DecoderConfig:
    """Return the config with a score head. Raises UserError if the family has no names for one."""
    if score.per == "token" and config.model_type in CLASSIFIERS:
        raise UserError(
            f"{config.architecture}: transformers reads a head that scores tokens under the name"
            " classifier here, which is not written; set task.labels to pairs, or train a model of"
            " another family"
        )
    changed = dataclasses.replace(config, score=score)
    if not any(entry.param == "score.weight" for entry in family(config).names(changed)):
        raise UserError(
            f"{config.architecture}: names() of {family(config).__name__} has no tensor for a head"
            " that scores; build it on jaxtrain.models.naming.outer_names"
        )
    changed.check()
    return changed


def check_family(module: ModuleType, architecture: str | None) -> type[DecoderConfig]:
    """Return the Config of a family's module. Raises UserError if it does not hold this
    architecture."""
    missing = [name for name in ("Config", "Model", "names") if not hasattr(module, name)]
    if missing:
        raise UserError(
            f"{module.__name__} is no model family: it has no {' and no '.join(missing)}; see"
            " docs/extending.md"
        )
    expected = module.Config.architecture
    if architecture not in (None, expected, *module.Config.also):
        raise UserError(
            f"config.json: architectures names {architecture!r}, but {module.__name__} holds"
            f" {expected!r}; change model.family, or Config.architecture there"
        )
    if module.Config.__module__ != module.__name__:
        raise UserError(
            f"{module.__name__}: its Config is written in {module.Config.__module__}, whose Model"
            " and names() would be used; write a subclass of it beside Model"
        )
    return module.Config


def read_config(folder: str | os.PathLike, family_module: str | None = None) -> DecoderConfig:
    """Read the config of a Hugging Face folder; family_module as in `config_from_hf`."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise UserError(f"{path} does not exist; expected a Hugging Face model folder")
    return config_from_hf(read_object(path), family_module, folder)
