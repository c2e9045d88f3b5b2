"""The base of all sections of the config: frozen, typed, bounded, closed."""

import functools
import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, get_args

from annotated_types import Le, Lt
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import core_schema

from jaxtrain import plugins
from jaxtrain.config.limits import LARGEST, find_misfits, find_numbers
from jaxtrain.text_safety import show

logger = logging.getLogger(__name__)


class Problems(ValueError):
    """Several sentences, each about one mistake."""

    def __init__(self, lines: Iterable[str]):
        self.lines = list(lines)
        super().__init__("; ".join(self.lines))


class Section(BaseModel):
    """A table of the config. The docstring under each field is its documentation everywhere.

    Numbers are finite and at most LARGEST, but where their field says otherwise; true and false are
    no numbers, nor the other way round. That holds for sections from outside as well.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        validate_default=True,
        protected_namespaces=(),
        allow_inf_nan=False,
    )

    renamed: ClassVar[Mapping[str, str]] = {}
    """Keys and text values of earlier versions, and their current names."""

    @model_validator(mode="before")
    @classmethod
    def accept_renamed(cls, table: Any) -> Any:
        """Read keys and values by the names that they had before, with a note on each."""
        if not cls.renamed or not isinstance(table, dict):
            return table
        for old in cls.renamed.keys() & table.keys():
            if cls.renamed[old] in table:
                raise ValueError(f"{old} is the old name of {cls.renamed[old]}; keep one of them")
        return {
            cls.update_name(key): cls.update_name(value) if isinstance(value, str) else value
            for key, value in table.items()
        }

    @classmethod
    def update_name(cls, name: str) -> str:
        """Return the current name of a key or value."""
        if name not in cls.renamed:
            return name
        note_renamed(name, cls.renamed[name])
        return cls.renamed[name]

    @field_validator("*", mode="before")
    @classmethod
    def check_kinds(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse a number for true or false and the other way round, in lists and tables, too."""
        if (name := info.field_name) in cls.model_fields:
            for problem in find_misfits(value, cls.model_fields[name].annotation):
                raise ValueError(problem)
        return value

    @field_validator("*", mode="after")
    @classmethod
    def check_size(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse numbers beyond LARGEST where the field has no bound of its own."""
        if (name := info.field_name) in cls.model_fields:
            field = cls.model_fields[name]
            bounded = any(isinstance(constraint, Le | Lt) for constraint in field.metadata)
            if not bounded and field.annotation is not None:
                for number in find_numbers(value, field.annotation):
                    if abs(number) > LARGEST:
                        raise ValueError(f"must be at most {LARGEST:,}, found {show(number)}")
        return value


@functools.cache
def note_renamed(old: str, new: str) -> None:
    """Log once per process that a config has an old name."""
    logger.warning("%r in the config is now called %r; the old name is still read", old, new)


@dataclass(frozen=True)
class Resumable:
    """Marks a key that may differ when a run is resumed: `Annotated[int, RESUMABLE]`."""


RESUMABLE = Resumable()
"""The value of this key shapes the trained weights by rounding at most; of a section: of no key."""


@dataclass(frozen=True)
class KnownIn:
    """Validate a text as the name of a built-in or an entry point, or as an import path."""

    group: str
    builtin: tuple[str, ...]

    def validate(self, name: str) -> str:
        """Return the name with a leading ~ expanded."""
        name = os.path.expanduser(name)
        plugins.check(self.group, name, self.builtin)
        return name

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return core_schema.no_info_after_validator_function(self.validate, handler(source))

    def __get_pydantic_json_schema__(self, schema: Any, handler: GetJsonSchemaHandler) -> Any:
        """Describe it so that editors offer the built-in names and accept any other text."""
        examples = ["package.module:name", "file.py:name"]
        plugin_schema = {**handler(schema), "examples": examples}
        return (
            {"anyOf": [{"enum": [*self.builtin]}, plugin_schema]} if self.builtin else plugin_schema
        )


def known_in(group: str, builtin: Collection[str]) -> KnownIn:
    """Build the annotation of a text that names something: Annotated[str, known_in(...)]."""
    return KnownIn(group, tuple(builtin))


def expand_home(path: str) -> str:
    """Expand a leading ~ of a path; ValueError for an empty one."""
    if not path.strip():
        raise ValueError("must not be empty; leave the key out where nothing is meant")
    return os.path.expanduser(path)


EXPANDED = AfterValidator(expand_home)
Place = Annotated[str, EXPANDED]
"""A file, a folder, or what may be one (a Hub id, "file.py:name"); a leading ~ is expanded."""


def list_places(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield (key, value) of every Place that is set in a section and all below it."""
    if isinstance(value, BaseModel):
        for name, field in type(value).model_fields.items():
            nested, nested_key = getattr(value, name), f"{key}.{name}" if key else name
            if EXPANDED in field.metadata or _is_place(field.annotation):
                texts = nested if isinstance(nested, list) else [nested] * (nested is not None)
                for index, text in enumerate(texts):
                    yield f"{nested_key}.{index}" if texts is nested else nested_key, text
            else:
                yield from list_places(nested, nested_key)
    elif isinstance(value, list | tuple | dict):
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from list_places(item, f"{key}.{name}")


def make_absolute(key: str, value: str) -> str:
    """Return a Place, the value of a key, as an absolute path if it is a path that is there; of
    "file.py:name" the file. Names, Hub ids and what is missing stay as they are."""
    path, colon, name = (value, "", "") if os.path.exists(value) else value.partition(":")
    # A word may be the name of something, beside which a folder of that name means nothing.
    named = "/" not in path and "." not in path and not key.endswith(("path", "tokenizer", "_dir"))
    if named or path in (".", "builtin") or not os.path.exists(path):
        return value
    return os.path.abspath(path) + colon + name


def _is_place(annotation: Any) -> bool:
    return annotation is Place or any(map(_is_place, get_args(annotation)))


Rule = Callable[[Any], list[str]]
"""Conflict between keys, by their dotted names in a config: returns sentences where it exists."""


def value_of(config: Any, key: str) -> Any:
    """Return the value of a dotted key."""
    return functools.reduce(getattr, key.split("."), config)


def is_set(config: Any, key: str) -> bool:
    """Return whether a dotted key differs from its default."""
    owner, _, name = key.rpartition(".")
    section = value_of(config, owner)
    default = type(section).model_fields[name].get_default(call_default_factory=True)
    return getattr(section, name) != default


def excludes(first: str, second: str) -> Rule:
    """Refuse two keys that set the same thing."""
    text = f"{first} and {second} are both set; keep one"
    return lambda config: [text] if is_set(config, first) and is_set(config, second) else []


def requires(key: str, needed: str, cure: str = "") -> Rule:
    """Refuse a key without a second key that it needs. cure: the end of the sentence."""
    text = f"{key} needs {needed}{cure}"
    return lambda config: [text] if value_of(config, key) and not value_of(config, needed) else []


def at_most(first: str, second: str) -> Rule:
    """Refuse a number above that of another key, where both are set."""

    def rule(config: Any) -> list[str]:
        low, high = value_of(config, first), value_of(config, second)
        if low is None or high is None or low <= high:
            return []
        return [f"{first} {low:,} is above {second} {high:,}; lower the first or raise the second"]

    return rule


def unread(
    keys: str, switch: str, reads: Callable[[Any], bool], why: str = "", cure: str = "remove it"
) -> Rule:
    """Refuse keys, separated by spaces, while `reads` is false for the value of `switch`; "a.*"
    stands for all keys of section a."""

    def rule(config: Any) -> list[str]:
        value, named = value_of(config, switch), []
        for key in keys.split() if not reads(value) else ():
            section = key.removesuffix(".*")
            fields = type(value_of(config, section)).model_fields if key != section else ()
            named += [f"{section}.{name}" for name in fields] or [key]
        state = str(value).lower() if isinstance(value, bool) else value
        return [
            f"{key} has no effect while {switch} is {state}{why}; {cure}"
            for key in named
            if is_set(config, key)
        ]

    return rule


def broken(rules: Iterable[Rule], config: Any) -> list[str]:
    """Return the sentences of rules that a config breaks."""
    return [text for rule in rules for text in rule(config)]


def members(annotation: Any) -> list[type[BaseModel]]:
    """Return the sections inside an annotation such as `list[DatasetConfig]`, `X | None` or a
    union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for arg in get_args(annotation) for model in members(arg)]


def section_type(annotation: Any) -> type[BaseModel] | None:
    """Return the first section inside an annotation."""
    return next(iter(members(annotation)), None)
