"""Plug-ins that a config names, with distribution and version, for a run's record and a model's
card. Nothing is imported for it."""

import hashlib
import json
from collections.abc import Iterator
from importlib.metadata import (
    Distribution,
    PackageNotFoundError,
    distribution,
    packages_distributions,
)
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from jaxtrain import plugins
from jaxtrain.config.data import DatasetConfig
from jaxtrain.config.env import EnvConfig
from jaxtrain.config.model import ModelConfig, OptimConfig
from jaxtrain.config.observers import ObserverConfig
from jaxtrain.config.rewards import RewardConfig
from jaxtrain.config.rollout import RolloutConfig
from jaxtrain.config.root import Config
from jaxtrain.config.run import LogConfig
from jaxtrain.config.task import TaskSection

CODE_KEYS: tuple[tuple[type[BaseModel], str, str], ...] = (
    (TaskSection, "kind", "tasks"),
    (ModelConfig, "family", "models"),
    (DatasetConfig, "format", "formats"),
    (RewardConfig, "function", "rewards"),
    (EnvConfig, "kind", "envs"),
    (EnvConfig, "path", "envs"),
    (EnvConfig, "tools", "tools"),
    (RolloutConfig, "engine", "engines"),
    (RolloutConfig, "curator", "curators"),
    (LogConfig, "sinks", "sinks"),
    (ObserverConfig, "kind", "observers"),
    (OptimConfig, "name", "optimizers"),
    (OptimConfig, "lr_scheduler", "schedules"),
)
"""(section, key, group of entry points) of every key that chooses code."""

MODULES = ("tasks", "models")
"""Groups of whole modules: "package.module" is one of them, where else it would be something in
one."""


def list_outside(config: Config) -> list[dict[str, str]]:
    """{"group", "name"} of whatever the config names and jaxtrain does not bring, in its order, and
    "distribution" and "version" of who does; of a file its "sha256", the first 16 digits."""
    origins: dict[tuple[str, str], dict[str, str]] = {}
    for group, name in list_names(config):
        if (group, name) not in origins and (origin := find_origin(group, name)) is not None:
            origins[group, name] = {"group": group, "name": name, **origin}
    return list(origins.values())


def list_names(value: Any) -> Iterator[tuple[str, str]]:
    """(group, name) of what a section and all below it choose by name."""
    if isinstance(value, BaseModel):
        for section, key, group in CODE_KEYS:
            if isinstance(value, section):
                chosen = getattr(value, key, None)
                names = chosen if isinstance(chosen, list) else [chosen]
                yield from ((group, name) for name in names if isinstance(name, str))
        if isinstance(value, ModelConfig):
            yield from (("models", name) for name in read_architectures(value))
        for name in type(value).model_fields:
            yield from list_names(getattr(value, name))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from list_names(item)
    elif isinstance(value, dict):
        yield from list_names(list(value.values()))


def read_architectures(model: ModelConfig) -> list[str]:
    """`architectures` of a config.json that stands in the config or in a folder here."""
    raw: Any = model.architecture
    if raw is None and model.path is not None:
        try:
            raw = json.loads((Path(model.path) / "config.json").read_bytes())
        except (OSError, ValueError):  # a Hub id, or a problem that loading the model reports
            return []
    names = raw.get("architectures") if isinstance(raw, dict) else None
    return [name for name in names or [] if isinstance(name, str)]


def find_origin(group: str, name: str) -> dict[str, str] | None:
    """Return the origin of a name; None for jaxtrain itself."""
    for entry in plugins.list_entry_points(group):
        if entry.name == name:
            return describe(entry.dist)
    module, _ = plugins.split_path(name, group in MODULES)
    if not module or module.startswith("jaxtrain."):
        return None
    if module.endswith(".py"):
        try:
            return {"sha256": hashlib.sha256(Path(module).read_bytes()).hexdigest()[:16]}
        except OSError:
            return {}
    owners = packages_distributions().get(module.split(".")[0], [])
    try:
        return describe(distribution(owners[0])) if owners else {}
    except PackageNotFoundError:
        return {}


def describe(owner: Distribution | None) -> dict[str, str]:
    """A distribution's name and version."""
    return {} if owner is None else {"distribution": owner.name, "version": owner.version}
