"""What every section of the config has in common: frozen, typed, closed to unknown keys."""

from collections.abc import Callable, Collection

from pydantic import BaseModel, ConfigDict

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
        plugins.check(group, name, builtin)
        return name

    return validate
