"""Changes of a config on the command line: `section.key=value`, `section=preset`, and `key=null`,
which sets a key back to its default where it takes no null."""

import difflib
import tomllib
from collections.abc import Callable, Collection, Sequence
from importlib import resources
from typing import Any

from jaxtrain.config.parse import check_plain
from jaxtrain.errors import UserError
from jaxtrain.text_safety import name_type, show

WHICH_MODEL = {"path", "init", "architecture", "family", "tokenizer", "chat_template"}
"""Keys of section model that say which model it is: a preset replaces them together."""

MAX_PARTS = 32
"""Of the key of an override."""

PRESETS = resources.files("jaxtrain") / "presets"


def change_table(
    table: dict[str, Any],
    overrides: Sequence[str],
    sections: Collection[str],
    takes_null: Callable[[Sequence[str]], bool],
) -> dict[str, Any]:
    """Set `a.b.0.c=value` in nested dicts and lists, in their order; `section=name` lays a preset
    over what the section holds. sections: those that a config has. takes_null: whether null is a
    value of a key; of another one it takes the key away. Raises UserError."""
    for override in overrides:
        key, equals, text = override.partition("=")
        parts = key.strip().split(".")
        if not equals or not all(part.strip() == part and part for part in parts):
            raise UserError(f"override {show(override)} is not of the form section.key=value")
        if len(parts) > MAX_PARTS:
            raise UserError(f"override {show(override)} has a key of {len(parts)} parts")
        value = parse_value(text)
        check_plain({key.strip(): value}, "override")
        if value is None and not takes_null(parts):
            _remove(table, parts)
            continue
        if len(parts) == 1:
            is_section = isinstance(value, list | dict) and parts[0] in sections
            table[parts[0]] = (
                value if is_section else lay_preset(table.get(parts[0]), parts[0], text, sections)
            )
            continue
        node: Any = table
        for part, below in zip(parts[:-1], parts[1:], strict=True):
            node = _child(node, part, override, empty=[] if _is_place(below) else {})
        if isinstance(node, list):
            node[_index(node, parts[-1], override)] = value
        else:
            node[parts[-1]] = value
    return table


def parse_value(text: str) -> Any:
    """A TOML value where the whole text is one ("1e-5", "true", "[1, 2]", "'quoted'"), else the
    text: what follows a value, such as a line that begins a section, makes it one. So do dates,
    which no key takes."""
    if text == "null":
        return None
    try:
        # Inside a list a comment, a second value or another key is an error, or shows.
        parsed = tomllib.loads(f"value = [{text}]")
    except (ValueError, RecursionError):
        return text
    values = parsed["value"]
    if set(parsed) != {"value"} or len(values) != 1 or text.rstrip().endswith(","):
        return text
    plain = isinstance(values[0], bool | int | float | str | list | dict)
    return values[0] if plain else text


def lay_presets(table: dict[str, Any], sections: Collection[str]) -> dict[str, Any]:
    """A file's table with `section = "preset"` replaced by the presets."""
    return {
        key: lay_preset(None, key, value, sections) if isinstance(value, str) else value
        for key, value in table.items()
    }


def lay_preset(below: Any, section: str, name: str, sections: Collection[str]) -> dict[str, Any]:
    """The preset's keys over those that the section has already: what the preset does not name
    stays, but for the keys that say which model it is."""
    preset = load_preset(section, name, sections)
    if below is None:
        return preset
    if not isinstance(below, dict):
        raise UserError(f"{section} is {name_type(below)}, not a table; it cannot take a preset")
    replaced = WHICH_MODEL if section == "model" and WHICH_MODEL & set(preset) else set()
    return {key: value for key, value in below.items() if key not in replaced} | preset


def load_preset(section: str, name: str, sections: Collection[str]) -> dict[str, Any]:
    """The shipped table `presets/<section>/<name>.toml`."""
    presets = list_presets()
    if section not in sections:
        near = difflib.get_close_matches(section[:64], sections, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(sections)}"
        raise UserError(f"unknown key {show(section)} (={show(name)}); {hint}")
    if section not in presets:
        raise UserError(
            f"{section}={show(name)}: this section has no presets, only {' and '.join(presets)}"
            f" have; set {section}.<key>=value"
        )
    if name not in presets[section]:
        raise UserError(
            f"{section}={show(name)}: no such preset; known presets: {', '.join(presets[section])};"
            f" or set {section}.<key>=value"
        )
    return tomllib.loads((PRESETS / section / f"{name}.toml").read_text(encoding="utf-8"))


def list_presets() -> dict[str, list[str]]:
    """{section: names of its presets}, both in alphabetical order."""
    return {
        folder.name: sorted(
            entry.name.removesuffix(".toml")
            for entry in folder.iterdir()
            if entry.name.endswith(".toml")
        )
        for folder in sorted(PRESETS.iterdir(), key=lambda path: path.name)
        if folder.is_dir()
    }


def _child(node: Any, part: str, override: str, empty: dict | list) -> Any:
    """The table or list below `node`; `empty` when it is not there yet."""
    if isinstance(node, list):
        child = node[_index(node, part, override)]
    else:
        child = node.setdefault(part, empty)
        if child is None:
            child = node[part] = empty
    if not isinstance(child, dict | list):
        raise UserError(
            f"override {show(override)}: {show(part)} holds {name_type(child)}, not a section"
        )
    return child


def _remove(table: dict[str, Any], parts: Sequence[str]) -> None:
    """Take a key out of nested dicts and lists; nothing where it is not there."""
    node: Any = table
    for part in parts[:-1]:
        if isinstance(node, list):
            node = node[int(part)] if _is_place(part) and int(part) < len(node) else None
        else:
            node = node.get(part) if isinstance(node, dict) else None
    if isinstance(node, dict):
        node.pop(parts[-1], None)


def _is_place(part: str) -> bool:
    return part.isascii() and part.isdigit() and len(part) < 7


def _index(node: list, part: str, override: str) -> int:
    """A position in a list of tables; one past the end appends."""
    if not _is_place(part) or int(part) > len(node):
        raise UserError(
            f"override {show(override)}: {show(part)} must be a position in a list of {len(node)}"
        )
    if int(part) == len(node):
        node.append({})
    return int(part)
