"""What every section of the config has in common: frozen, typed, closed to unknown keys."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A table of the config. The docstring under each field is its documentation everywhere."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        validate_default=True,
        protected_namespaces=(),
    )
