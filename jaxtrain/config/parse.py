"""From a config file to plain nested dicts: TOML, YAML and JSON, read within bounds.

What comes out holds true and false, finite numbers, texts, lists and tables with text keys, and
nothing else; no file, however it is made, takes more than moments to read or refuse.
"""

import math
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from jaxtrain.errors import UserError
from jaxtrain.safe_io import DEPTH, parse_json, read_text
from jaxtrain.text_safety import name_type, shorten, show

MAX_BYTES = 2**18
"""Of a config file."""
MAX_VALUES = 10_000
"""Of a config: numbers, texts, lists and tables together, YAML's aliases written out."""

# tomllib's time and memory grow with the square of a key's parts.
_LONG_KEY = re.compile(r"""(?<![\w-])(?:(?:[\w-]+|"[^"\n]{0,64}"|'[^'\n]{0,64}')\s*\.\s*){64}""")


def read_table(path: str | Path) -> dict[str, Any]:
    """Parse a .toml, .yaml, .yml or .json file; raises UserError with one line."""
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in (".toml", ".yaml", ".yml", ".json"):
        raise UserError(f"config file {show(str(path))} must end in .toml, .yaml, .yml or .json")
    try:
        text = read_text(path, MAX_BYTES)
    except FileNotFoundError:
        near = sorted(str(p) for p in Path("configs").glob("**/*.toml"))
        hint = f"; the configs here are {', '.join(near)}" if near else ""
        raise UserError(f"config file {show(str(path))} does not exist{hint}") from None
    except OSError as error:
        raise UserError(f"config file {show(str(path))}: {error.strerror or error}") from None
    except ValueError as error:
        raise UserError(f"config file {show(str(path))} {error}") from None
    try:
        table = {".toml": parse_toml, ".json": parse_strict}.get(suffix, parse_yaml)(text)
    except ValueError as error:
        raise UserError(f"{path} is not valid {suffix[1:].upper()}: {error}") from None
    if table is None:
        table = {}
    if not isinstance(table, dict):
        raise UserError(f"{path} must hold sections, not {name_type(table)}")
    check_plain(table, str(path))
    return table


def parse_toml(text: str) -> Any:
    """TOML; ValueError with a reason of one line."""
    if long_key := _LONG_KEY.search(text):
        line = text.count("\n", 0, long_key.start()) + 1
        raise ValueError(f"a key of more than 64 parts in line {line}")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError(f"nested deeper than {DEPTH} levels") from None
    except ValueError as error:  # of tomllib, or a whole number of more than 4,300 digits
        raise ValueError(_one_line(error)) from None


def parse_strict(text: str) -> Any:
    """JSON without double keys, NaN and Infinity; ValueError with a reason of one line."""
    return parse_json(text, strict=True)


def parse_yaml(text: str) -> Any:
    """YAML without double keys and anything but plain values; ValueError with a reason."""
    try:
        _check_events(text)
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _check_nodes(node)
        return loader.construct_document(node)
    except yaml.YAMLError as error:
        raise ValueError(_one_line(error)) from None
    except (KeyError, IndexError, TypeError, AttributeError, OverflowError) as error:
        # What PyYAML raises where a tag (!!int, !!bool) does not fit its value.
        raise ValueError(f"a value does not fit its tag ({type(error).__name__})") from None
    except RecursionError:
        raise ValueError(f"nested deeper than {DEPTH} levels") from None


def _check_events(text: str) -> None:
    """Refuse depth and size before anything recurses."""
    depth = 0
    for number, event in enumerate(yaml.parse(text, yaml.SafeLoader)):
        depth += isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent)
        depth -= isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent)
        if depth > DEPTH:
            raise ValueError(
                f"nested deeper than {DEPTH} levels in line {event.start_mark.line + 1}"
            )
        if number > 3 * MAX_VALUES:
            raise ValueError(f"it holds more than {MAX_VALUES:,} values")


def _check_nodes(root: Any) -> None:
    """Refuse double keys, aliases that hold themselves, and those that grow beyond MAX_VALUES."""
    sizes: dict[int, int] = {}
    stack: list[tuple[Any, bool]] = [(root, False)]
    while stack:
        node, done = stack.pop()
        if isinstance(node, yaml.ScalarNode):
            sizes[id(node)] = 1
            if node.tag.endswith((":int", ":float")) and len(node.value) > 100:
                raise ValueError(f"line {node.start_mark.line + 1}: a number of over 100 digits")
            continue
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        inner = [n for pair in pairs for n in pair] if pairs else list(node.value)
        if done:
            size = 1 + sum(sizes[id(child)] for child in inner)
            if size > MAX_VALUES:
                raise ValueError(
                    f"with its aliases written out it holds more than {MAX_VALUES:,} values"
                )
            sizes[id(node)] = size
            continue
        if id(node) in sizes:
            if sizes[id(node)] == 0:
                raise ValueError(f"line {node.start_mark.line + 1} holds itself by an alias")
            continue
        sizes[id(node)] = 0
        _check_keys(pairs)
        stack.append((node, True))
        stack += [(child, False) for child in inner if sizes.get(id(child), 0) == 0]


def _check_keys(pairs: list[tuple[Any, Any]]) -> None:
    first: dict[tuple[str, str], int] = {}
    for key, _ in pairs:
        if not isinstance(key, yaml.ScalarNode):
            continue
        line, name = key.start_mark.line + 1, (key.tag, key.value)
        if name in first:
            raise ValueError(
                f"the key {show(key.value)} stands twice in one table (lines {first[name]} and"
                f" {line})"
            )
        first[name] = line


def check_plain(table: Any, origin: str) -> None:
    """Raise UserError for values that no config has, naming at most eight keys of them."""
    problems = list(zip(range(8), _find_foreign(table), strict=False))
    if problems:
        raise UserError(f"{origin}:\n" + "\n".join(f"  {line}" for _, line in problems))


def _find_foreign(table: Any) -> Iterator[str]:
    pending: list[tuple[str, Any, int]] = [("", table, 0)]
    count = 0
    while pending:
        key, value, depth = pending.pop()
        count += 1
        if count > MAX_VALUES or depth > DEPTH:
            much = f"more than {MAX_VALUES:,} values" if depth <= DEPTH else "tables too deep"
            yield f"{shorten(key, 100) or 'it'}: {much}; a config has a few hundred values"
            return
        name = shorten(key, 100)
        if isinstance(value, dict):
            for part, inner in value.items():
                if not isinstance(part, str):
                    yield f"{name or 'it'}: the key {show(part)} is {name_type(part)}, not a text"
                else:
                    pending.append((f"{key}.{part}" if key else part, inner, depth + 1))
                    if (why := _unusable(part)) is not None:
                        yield f"{name or 'it'}: the key {show(part)} {why}"
        elif isinstance(value, list):
            pending += [(f"{key}.{i}", inner, depth + 1) for i, inner in enumerate(value)]
        elif isinstance(value, str):
            if (why := _unusable(value)) is not None:
                yield f"{name}: {show(value)} {why}"
        elif isinstance(value, float) and not math.isfinite(value):
            yield f"{name}: {value} is no number that a key can have"
        elif isinstance(value, int) and abs(value) >= 2**63:
            yield f"{name}: {show(value)} is too large; at most 2^63 - 1"
        elif not isinstance(value, int | float | None):
            yield f"{name}: {show(value)} is {name_type(value)}; write it in quotes"


def _unusable(text: str) -> str | None:
    """Why a text cannot be used; None where it can."""
    if "\0" in text:
        return "holds a NUL character"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "holds half a surrogate pair"
    return None


def _one_line(error: Exception) -> str:
    return shorten(" ".join(str(error).split()), 300)
