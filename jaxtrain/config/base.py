"""What every section of the config has in common: frozen, typed, closed to unknown keys."""

import os
from collections.abc import Callable, Collection, Iterator
from typing import Annotated, Any, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict

from jaxtrain import plugins


class Section(BaseModel):
    """A table of the config. The docstring under each field is its documentation everywhere."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        validate_default=True,
        protected_namespaces=(),
    )


def known_in(group: str, builtin: Collection[str]) -> Callable[[str], str]:
    """A validator for the name of a built-in, of an entry point, or of an import path."""

    def validate(name: str) -> str:
        name = os.path.expanduser(name)
        plugins.check(group, name, builtin)
        return name

    return validate


EXPANDED = AfterValidator(os.path.expanduser)
Place = Annotated[str, EXPANDED]
"""A file, a folder, or what may be one (a Hub id, "file.py:name"); a leading ~ is somebody's home.
"""


def list_places(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """(key, value) of every Place that is set in a section and all below it."""
    if isinstance(value, BaseModel):
        for name, field in type(value).model_fields.items():
            found, at = getattr(value, name), f"{key}.{name}" if key else name
            if isinstance(found, str):
                if EXPANDED in field.metadata or _is_place(field.annotation):
                    yield at, found
            else:
                yield from list_places(found, at)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from list_places(item, f"{key}.{index}")


def _is_place(annotation: Any) -> bool:
    return annotation is Place or any(map(_is_place, get_args(annotation)))
