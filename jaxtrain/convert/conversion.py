"""Conversion of another system's keys to ours: rules, their output, and the file written."""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from jaxtrain.text_safety import shorten, show

Apply: TypeAlias = "Callable[[Conversion, Any], None]"


_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")


def read_numbers(value: Any) -> Any:
    """Return a value with texts such as "2e-4" as the numbers that they are meant for: YAML 1.1,
    which PyYAML reads, knows an exponent only behind a point and with a sign."""
    if isinstance(value, str):
        number = float(value) if _NUMBER.fullmatch(value) else math.inf
        return value if math.isinf(number) else number
    if isinstance(value, list):
        return [read_numbers(entry) for entry in value]
    if isinstance(value, dict):
        return {key: read_numbers(entry) for key, entry in value.items()}
    return value


@dataclass(frozen=True)
class ConversionRule:
    """Rule for one key."""

    hint: str
    """What it is here, for people: a key, or why there is none."""
    apply: Apply
    key: str | None = None
    """Ours, where it is one key."""
    inner: "Mapping[str, ConversionRule] | None" = None
    """Of a table: the rules of its keys."""


def to(key: str, values: Mapping[Any, Any] | None = None, note: str = "") -> ConversionRule:
    """Rename a key; `values`: theirs and ours, others have no counterpart."""

    def apply(conversion: "Conversion", value: Any) -> None:
        if value is None:
            return
        if values is None:
            conversion.set(key, value)
        elif isinstance(value, str | bool | int | float) and value in values:
            conversion.set(key, values[value])
        else:
            allowed = ", ".join(dict.fromkeys(map(str, values)))
            conversion.miss(f"{key} here, which has nothing for it (converted are {allowed})")
        if note:
            conversion.log(note)

    return ConversionRule(f"{key} ({note})" if note else key, apply, key)


def always(reason: str) -> ConversionRule:
    """Ignore a key that needs no counterpart."""
    return ConversionRule(f"not needed: {reason}", lambda conversion, value: None)


def missing(reason: str = "there is no such thing here yet") -> ConversionRule:
    """It changes what is trained, and has no counterpart."""

    def apply(conversion: "Conversion", value: Any) -> None:
        if value not in (None, False, 0, [], {}, ""):
            conversion.miss(reason)

    return ConversionRule(f"nothing: {reason}", apply)


def by(hint: str) -> Callable[[Apply], ConversionRule]:
    """A rule from a function of (conversion, value)."""
    return lambda apply: ConversionRule(hint, apply)


@dataclass
class Conversion:
    """A config of ours on its way, from a table of theirs."""

    source: Mapping[str, Any]
    table: dict[str, Any] = field(default_factory=dict)
    """Ours, nested."""
    missed: list[tuple[str, Any, str]] = field(default_factory=list)
    """(key, value, why) of what has no counterpart."""
    notes: list[tuple[str, str]] = field(default_factory=list)
    """(key, what to know about it)."""
    _at: tuple[str, Any] = ("", None)

    def run(
        self, rules: Mapping[str, ConversionRule], source: Mapping[str, Any], prefix: str = ""
    ) -> None:
        """Apply the rules to every key of a table of theirs, in its order."""
        for key, value in source.items():
            before, self._at = self._at, (prefix + str(key), value)
            self._apply(rules.get(key), value)
            self._at = before

    def _apply(self, rule: ConversionRule | None, value: Any) -> None:
        if rule is None:
            self.miss("unknown to this converter")
            return
        try:
            rule.apply(self, value)
        except (TypeError, ValueError, ArithmeticError, AttributeError, LookupError):
            # The border: rules take values to be of the kind that the other system allows.
            self.miss("its value is of a kind that is not expected there")

    def set(self, key: str, value: Any) -> None:
        """Put a value under a dotted key of ours; the last one counts. None sets nothing."""
        if value is None:
            return
        table = self.table
        *path, last = key.split(".")
        for part in path:
            table = table.setdefault(part, {})
        table[last] = value

    def get(self, key: str) -> Any:
        """Return the value under a dotted key of ours; None if it is not set."""
        value: Any = self.table
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value

    def miss(self, why: str) -> None:
        """The key at hand has no counterpart."""
        self.missed.append((*self._at, why))

    def log(self, text: str) -> None:
        """Something to know about the key at hand."""
        self.notes.append((self._at[0], text))

    def write(self, head: str) -> str:
        """The config as TOML, below what has no counterpart, each in a comment."""
        lines = [f"# {line}" for line in head.splitlines()]
        lines += [f"# {key}: {text}" for key, text in self.notes]
        if self.missed:
            lines += ["#", "# No counterpart:"]
            lines += [f"#   {key} = {_one_line(value)}: {why}" for key, value, why in self.missed]
        return "\n".join(lines) + "\n" + "\n".join(_toml(self.table)) + "\n"


def _one_line(value: Any) -> str:
    return shorten(show(value), 80)


def _toml(table: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Lines of a table: its values, then its tables."""
    inner = {key: value for key, value in table.items() if _is_section(value)}
    for key, value in table.items():
        if key not in inner and value is not None:
            yield f"{_key(key)} = {_value(value)}"
    for key, value in inner.items():
        name = f"{path}{_key(key)}"
        if isinstance(value, list):
            for entry in value:
                yield from ("", f"[[{name}]]", *_toml(entry, f"{name}."))
        else:
            yield from ("", f"[{name}]", *_toml(value, f"{name}."))


def _is_section(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(isinstance(entry, dict) for entry in value)
    return isinstance(value, dict) and bool(value)


def _key(key: str) -> str:
    plain = key.replace("_", "").replace("-", "")
    return key if plain.isascii() and plain.isalnum() else json.dumps(key)


def _value(value: Any) -> str:
    if isinstance(value, dict):
        entries = {k: v for k, v in value.items() if v is not None}
        return "{ " + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in entries.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(entry) for entry in value if entry is not None) + "]"
    if isinstance(value, float) and (math.isinf(value) or math.isnan(value)):
        return str(value)
    # A JSON text is a TOML text once DEL is escaped as well.
    return json.dumps(value).replace("\x7f", "\\u007f")
