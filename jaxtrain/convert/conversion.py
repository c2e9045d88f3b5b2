"""Tables of another system's keys, and the conversion of its config by them."""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from jaxtrain.text_safety import escape_control_chars, shorten, show

Apply: TypeAlias = "Callable[[Conversion, Any], None]"
Rules: TypeAlias = "Mapping[str, ConversionRule]"

_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")
_LINE = re.compile(r"([\w ]+?) +([=!~@-]) +(.*)")
_HEADING = re.compile(r"\[(.*?)\] ?(.*)")
BORDER = (TypeError, ValueError, ArithmeticError, AttributeError, LookupError)
"""Errors of rules, which take values to be of the kind that the other system allows."""
EMPTY = (None, False, 0, [], {}, "")
"""Values that ask for nothing."""


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
    inner: "Rules | None" = None
    """Of a table: the rules of its keys."""


def load_rules(name: str, functions: Mapping[str, Any]) -> dict[str, ConversionRule]:
    """Return the rules of tables/NAME.txt by key. A heading in brackets names the tables, with dots
    where they are nested, whose keys stand below it; a line is for keys with the same rule:

        key key = our.key           renamed; a star stands for the key itself
        key = our.key | a>b c       with the values that it may have, theirs>ours
        key = our.key # text        with something to know about it
        key key - because           not needed here
        key - because | a b         not needed with these values; others have no counterpart
        key key ! instead           no counterpart
        key ~ here                  read by the rule of another key, or at the end
        key @ function: here        a function of (conversion, value), one of `functions`

    An indented line goes on with the one before.
    """
    text = (Path(__file__).parent / "tables" / f"{name}.txt").read_text(encoding="utf-8")
    rules: dict[str, Any] = {}
    tables = [rules]
    for line in re.sub(r"\n +", " ", text.strip()).splitlines():
        if heading := _HEADING.fullmatch(line):
            tables = [_inner(rules, title, heading[2]) for title in heading[1].split(", ")]
        else:
            read = _read_line(line, functions)
            for table in tables:
                table.update(read)
    return rules


def _inner(rules: dict[str, Any], title: str, hint: str) -> dict[str, Any]:
    """Return the rules of a table's own keys, of which there may be none yet."""
    path = title.split(".")
    for depth, part in enumerate(path):
        if part not in rules:
            rules[part] = section(".".join(path[: depth + 1]), {}, hint or "spread over sections")
        rules = rules[part].inner
    return rules


def _read_line(line: str, functions: Mapping[str, Any]) -> dict[str, ConversionRule]:
    match = _LINE.fullmatch(line)
    assert match is not None, line
    names, sign, right = match.groups()
    if sign == "@":
        function, _, hint = right.partition(": ")
        return dict.fromkeys(names.split(), ConversionRule(hint, functions[function]))
    right, _, note = right.partition(" # ") if sign == "=" else (right, "", "")
    text, _, listed = right.partition(" | ")
    pairs = [pair.partition(">") for pair in listed.split()]
    values = {_scalar(old): _scalar(new) if arrow else _scalar(old) for old, arrow, new in pairs}
    return {name: _make_rule(sign, text.replace("*", name), values, note) for name in names.split()}


def _make_rule(sign: str, text: str, values: Mapping[Any, Any], note: str) -> ConversionRule:
    """Return the rule of a line: its sign, what stands behind it, values, and a note."""

    def apply(conversion: "Conversion", value: Any) -> None:
        allowed = not values or (isinstance(value, str | bool | int | float) and value in values)
        if sign == "=" and allowed:
            conversion.set(text, values[value] if values else value)
        if value in EMPTY or sign == "~":
            return
        if sign == "=" and not allowed:
            names = ", ".join(dict.fromkeys(map(str, values)))
            conversion.miss(f"{text} here, which has nothing for it (converted are {names})")
        elif sign == "!" or not allowed:
            conversion.miss(text)
        elif sign == "-":
            conversion.drop(text)
        if note:
            conversion.log(note)

    prefix = {"-": "not needed: ", "!": "nothing: "}.get(sign, "")
    hint = f"{prefix}{text} ({note})" if note else prefix + text
    return ConversionRule(hint, apply, text if sign == "=" else None)


def _scalar(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def section(name: str, rules: Rules, hint: str) -> ConversionRule:
    """Rule of a table with rules of its own; `name` stands before its keys in messages."""

    def apply(conversion: "Conversion", value: Any) -> None:
        if isinstance(value, Mapping):
            conversion.run(rules, value, prefix=f"{name}.")
        elif value not in EMPTY and value is not True:
            conversion.miss("a table is expected there")

    return ConversionRule(hint, apply, inner=rules)


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
    dropped: dict[str, list[str]] = field(default_factory=dict)
    """{why: keys} of what is not needed here."""
    images: str | None = None
    """The source's key that says that its data have images."""
    _at: tuple[str, Any] = ("", None)

    def run(self, rules: Rules, source: Mapping[str, Any], prefix: str = "") -> None:
        """Apply the rules to every key of a table of theirs, in its order."""
        for key, value in source.items():
            before, self._at = self._at, (prefix + str(key), value)
            rule = rules.get(key)
            try:
                if rule is not None:
                    rule.apply(self, value)
                elif value not in (None, "", [], {}):
                    self.miss("unknown to this converter")
            except BORDER:
                self.miss("its value is of a kind that is not expected there")
            self._at = before

    def attempt(self, *steps: "Callable[[Conversion], None]") -> None:
        """Take steps that read several keys together; one that fails leaves a line."""
        for step in steps:
            try:
                step(self)
            except BORDER:
                reason = "values that it reads are of a kind that is not expected there"
                self.missed.append((step.__name__.strip("_").replace("_", " "), None, reason))

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

    def remove(self, key: str) -> Any:
        """Take a dotted key of ours away and return its value; None if it is not set."""
        parent, _, last = key.rpartition(".")
        table = self.get(parent) if parent else self.table
        value = table.pop(last, None) if isinstance(table, dict) else None
        if table == {} and parent:
            self.remove(parent)
        return value

    def miss(self, why: str, key: str | None = None) -> None:
        """Record that the key at hand, or another of the source, has no counterpart."""
        self.missed.append((*self._at, why) if key is None else (key, self.source.get(key), why))

    def log(self, text: str, key: str | None = None) -> None:
        """Record something to know about the key at hand, or another."""
        self.notes.append((key or self._at[0], text))

    def drop(self, why: str, key: str | None = None) -> None:
        """Record that the key at hand, or another, is not needed."""
        self.dropped.setdefault(why, []).append(key or self._at[0])

    def write(self, head: str) -> str:
        """Return the config as TOML, below comments on what was dropped or has no counterpart."""
        lines = [f"# {line}" for line in head.splitlines()]
        lines += [f"# {escape_control_chars(f'{key}: {text}')}" for key, text in self.notes]
        if self.missed:
            lines += ["#", "# No counterpart:"]
            lines += [f"#   {describe(entry)}" for entry in self.missed]
        if self.dropped:
            lines += ["#", "# Not needed:"]
            lines += [
                escape_control_chars(f"#   {', '.join(keys)}: {why}")
                for why, keys in self.dropped.items()
            ]
        return "\n".join(lines) + "\n" + "\n".join(_toml(self.table)) + "\n"


def describe(missed: tuple[str, Any, str]) -> str:
    """Return a key without counterpart, its value and the reason, on one line."""
    key, value, why = missed
    return escape_control_chars(f"{key} = {shorten(show(value), 80)}: {why}")


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
