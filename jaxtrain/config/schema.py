"""The config's JSON schema, for editors: what a file of configs/ may hold.

Draft 7, which taplo (Even Better TOML) and the YAML language server understand. It knows keys,
types and bounds; what keys may not say together only `jaxtrain --config FILE --dry-run` tells.
"""

import json
from typing import Any

from jaxtrain.config.load import kind_of
from jaxtrain.config.overrides import list_presets
from jaxtrain.config.root import TASKS, Config

IDENTITY = "urn:jaxtrain:config"


def make_schema() -> dict[str, Any]:
    """The schema as a JSON object: pydantic's own, with presets in the place of sections and the
    kinds of section task told apart by `kind`."""
    schema = Config.model_json_schema()
    parts = schema["$defs"]
    for part in parts.values():
        tidy(part)
    tidy(schema)
    for kind, section in TASKS.items():
        part = parts[section.__name__]
        part["properties"]["kind"] = {**part["properties"]["kind"], "const": kind}
        if kind != "sft":  # what a section without kind is
            part["required"] = sorted({*part.get("required", []), "kind"})
    parts["TaskSection"] = describe_outside()
    sections = schema["properties"]
    sections["task"]["discriminator"] = {
        "propertyName": "kind",
        "mapping": {kind: f"#/$defs/{section.__name__}" for kind, section in TASKS.items()},
    }
    for name, presets in list_presets().items():
        preset = {"enum": presets, "description": "A preset, shipped with jaxtrain."}
        sections[name] = {"anyOf": [preset, sections[name]]}
    head = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$id": IDENTITY,
        "title": "jaxtrain config",
    }
    return {**head, **{key: value for key, value in schema.items() if key not in head}}


def render_schema() -> str:
    """Render the schema as the text of docs/schema.json."""
    return json.dumps(make_schema(), indent=1) + "\n"


def tidy(part: dict[str, Any]) -> None:
    """Take off what says nothing to a reader: titles made of keys, defaults that are null or
    written out sections; lines of a description become one."""
    if "description" in part:
        part["description"] = " ".join(part["description"].split())
    for field in part.get("properties", {}).values():
        field.pop("title", None)
        if field.get("default", 0) is None or isinstance(field.get("default"), dict):
            del field["default"]
        if "description" in field:
            field["description"] = " ".join(field["description"].split())


def describe_outside() -> dict[str, Any]:
    """Section task of a method from outside, whose keys only its package knows."""
    assert all(kind_of(section) == kind for kind, section in TASKS.items())
    kind = {
        "type": "string",
        "not": {"enum": list(TASKS)},
        "description": 'A method from outside: an entry point, "package.module" or "file.py".',
    }
    return {
        "title": "A method from outside",
        "type": "object",
        "properties": {"kind": kind},
        "required": ["kind"],
    }
