"""The training methods: each kind is declared by a folder of jaxtrain/methods."""

import importlib
import pkgutil
from dataclasses import dataclass
from typing import Annotated, Any, Union

from pydantic import Discriminator, InstanceOf, Tag

from jaxtrain import methods
from jaxtrain.config.task import TaskSection

DEFAULT_KIND = "sft"
"""The method of a config without task.kind."""


@dataclass(frozen=True)
class Kind:
    """The modules behind one task.kind."""

    section: str
    """Its section task: "module:Class"."""
    method: str
    """The module with `open_data` and `make` (`core.task.Method`)."""
    trains: str
    """"policy", or "draft": such a section also goes into rollout.draft_refresh.task."""


def scan_kinds() -> dict[str, Kind]:
    """Read the declaration `KINDS` of every folder of jaxtrain/methods, the default kind first."""
    kinds = {}
    for folder in pkgutil.iter_modules(methods.__path__, f"{methods.__name__}."):
        if folder.ispkg:
            declared = getattr(importlib.import_module(folder.name), "KINDS", {})
            for name, kind in declared.items():
                kinds[name] = Kind(
                    section=f"{folder.name}.{kind['section']}",
                    method=f"{folder.name}.{kind['method']}",
                    trains=kind.get("trains", "policy"),
                )
    return dict(sorted(kinds.items(), key=lambda entry: (entry[0] != DEFAULT_KIND, entry[0])))


KINDS = scan_kinds()
"""The built-in methods by task.kind."""


def load_section(kind: str) -> type[TaskSection]:
    """Import the section of a built-in method."""
    module, _, name = KINDS[kind].section.partition(":")
    return getattr(importlib.import_module(module), name)


def union_of(sections: dict[str, Any], discriminator: Discriminator) -> Any:
    """Build the union of sections by kind."""
    if len(sections) < 2:  # pydantic discriminates only between two or more
        return next(iter(sections.values()), InstanceOf[TaskSection])
    members = [Annotated[section, Tag(kind)] for kind, section in sections.items()]
    return Annotated[Union[tuple(members)], discriminator]  # noqa: UP007
