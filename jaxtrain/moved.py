"""Import paths of earlier versions, so that plug-ins and configs that name them go on working.

A finder at the end of sys.meta_path answers for modules that do not exist: it gives an empty module
whose attributes are looked up in the new place, with a DeprecationWarning.
"""

import importlib
import importlib.abc
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

PACKAGES = {
    "envs": "environments",
    "hf": "huggingface",
    "losses": "core.losses",
    "observers": "runs.observers",
    "parallel": "distributed",
    "rewards": "environments.rewards",
    "rollout": "generation",
    "run": "runs",
    "sandbox": "environments.sandbox",
    "tasks": "methods",
    "train": "core",
}
"""Old and new packages; modules below them keep their names unless MODULES has them."""

MODULES = {
    "core.assemble": "core.bundle core.architecture core.weights",
    "data.calculator": "data.sources.calculator",
    "data.messages": "data.chat.messages",
    "data.prompt_sets": "data.sources.prompt_sets",
    "data.readers": "data.sources.readers",
    "data.template": "data.chat.template",
    "data.trees": "methods.trees.data",
    "envs.open": "environments.factory",
    "foreign": "safe_io",
    "observers.types": "runs.observers.protocol",
    "rollout.types": "generation.engine generation.episodes generation.publisher",
    "sandbox.run": "environments.sandbox.pool",
    "shown": "text_safety",
    "tasks.distillation": "methods.distillation.method",
    "tasks.ebft": "methods.ebft.method",
    "tasks.preference": "methods.preference.method",
    "tasks.prompts": "methods.rl.prompt_data",
    "tasks.reward_model": "methods.reward_model.method",
    "tasks.rl": "methods.rl.method",
    "tasks.sft": "methods.sft.method",
    "tasks.tree": "methods.trees.method",
    "train.trained": "methods.reopen",
}
"""Old modules and the modules that have their content now."""

NAMES = {
    "core.assemble.Parts": "ModelBundle",
    "core.assemble.assemble": "build_model_bundle",
    "core.assemble.assemble_beside": "build_auxiliary_bundle",
    "data.readers.Part": "MixturePart",
    "envs.scripted.Script": "ScriptedEngine",
    "envs.talk.Answer": "AssistantReply",
    "envs.talk.Talk": "PolicyConversation",
    "foreign.Unreadable": "UnreadableRow",
    "observers.types.Run": "ObservedRun",
    "rewards.load.NotFinite": "NonFiniteReward",
    "rollout.types.Ask": "PromptRequest",
    "rollout.types.Keeping": "KeepsVersions",
    "rollout.types.Reply": "PolicyReply",
    "rollout.types.Shared": "SharedServers",
    "rollout.types.Speaker": "FrozenPolicy",
    "shown.printable": "escape_control_chars",
}
"""What was renamed in them."""


def find_places(name: str) -> list[str]:
    """Return the modules that have the content of an old one; none for a name that never was."""
    old = name.removeprefix("jaxtrain.")
    if old in MODULES:
        return [f"jaxtrain.{module}" for module in MODULES[old].split()]
    package, _, rest = old.partition(".")
    if package not in PACKAGES:
        return []
    module = f"jaxtrain.{PACKAGES[package]}" + (f".{rest}" if rest else "")
    try:
        return [module] if importlib.util.find_spec(module) else []
    except ModuleNotFoundError:  # not even its package is there
        return []


class MovedModule(ModuleType):
    """An old module name that forwards attributes to the new modules."""

    places: Sequence[str]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked for by the import system and by debuggers
            raise AttributeError(name)
        old = f"{self.__name__.removeprefix('jaxtrain.')}.{name}"
        if old in MODULES:
            return importlib.import_module(f"jaxtrain.{old}")
        current = NAMES.get(old, name)
        for path in self.places:
            module = importlib.import_module(path)
            if hasattr(module, current):
                text = f"jaxtrain.{old} is now {path}.{current}"
                warnings.warn(text, DeprecationWarning, stacklevel=2)
                return getattr(module, current)
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


class MovedFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules by the paths of earlier versions."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a `MovedModule`; None where the path is not an old one of ours."""
        if not fullname.startswith("jaxtrain.") or not find_places(fullname):
            return None
        # A package, so that modules below it are looked for as well.
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module of an old path."""
        module = MovedModule(spec.name)
        module.places = find_places(spec.name)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Run nothing: the module has no code."""


def install() -> None:
    """Make the old paths importable, once per process."""
    if not any(isinstance(finder, MovedFinder) for finder in sys.meta_path):
        sys.meta_path.append(MovedFinder())
