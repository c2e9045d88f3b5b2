"""The JSON schema: it takes every config that we ship, and no key or value that is none."""

import json
import tomllib
from pathlib import Path

import jsonschema
import pytest

from jaxtrain.config.overrides import list_presets
from jaxtrain.config.root import TASKS
from jaxtrain.config.schema import make_schema, render_schema
from jaxtrain.main import main

ROOT = Path(__file__).parents[2]
CONFIGS = sorted(ROOT.glob("configs/**/*.toml"))
SCHEMA = make_schema()
VALIDATOR = jsonschema.Draft7Validator(SCHEMA)
SECTIONS = [name for name in SCHEMA["properties"] if name not in ("rewards", "observers")]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configs_are_taken_and_name_the_schema(path):
    errors = list(VALIDATOR.iter_errors(tomllib.loads(path.read_text())))
    assert not errors, errors[0].message
    first = path.read_text().splitlines()[0]
    assert first.startswith("#:schema "), "the first line names the schema for editors"
    named = (path.parent / first.removeprefix("#:schema ")).resolve()
    assert named == ROOT / "docs" / "schema.json"


@pytest.mark.parametrize("section", SECTIONS)
def test_a_typo_in_a_section_is_refused(section):
    assert VALIDATOR.is_valid({section: {}})
    assert not VALIDATOR.is_valid({section: {"enabledd": True}})
    assert not VALIDATOR.is_valid({section + "s": {}})


def test_every_table_below_a_section_is_closed():
    closed = {name: part.get("additionalProperties") for name, part in SCHEMA["$defs"].items()}
    assert {name for name, value in closed.items() if value is not False} == {"TaskSection"}


@pytest.mark.parametrize("kind", TASKS)
def test_a_method_is_told_by_its_kind(kind):
    least = {"teacher": {"path": "t"}} if kind == "distillation" else {}
    assert VALIDATOR.is_valid({"task": {"kind": kind, **least}})
    assert not VALIDATOR.is_valid({"task": {"kind": kind, **least, "enabledd": 1}})
    mapping = SCHEMA["properties"]["task"]["discriminator"]["mapping"]
    name = mapping[kind].removeprefix("#/$defs/")
    assert SCHEMA["$defs"][name]["properties"]["kind"]["const"] == kind


def test_values_presets_and_strangers():
    assert VALIDATOR.is_valid({"model": "tiny", "adapter": list_presets()["adapter"][0]})
    assert VALIDATOR.is_valid({"task": {"kind": "my_package.method", "anything": 1}})
    assert VALIDATOR.is_valid({"task": {"kind": "rl"}, "rewards": [{"function": "math"}]})
    assert VALIDATOR.is_valid({"observers": [{"kind": "early_stop", "options": {"patience": 2}}]})
    for wrong in (
        {"model": "tinny"},
        {"run": {"max_steps": 0}},
        {"optim": {"learning_rate": "fast"}},
        {"task": {"kind": "preference", "objective": "grpo"}},
        {"rewards": [{"funktion": "math"}]},
        {"data": {"datasets": [{"pth": "x"}]}},
    ):
        assert not VALIDATOR.is_valid(wrong), wrong


def test_editors_are_offered_the_names_that_are_built_in():
    optim = SCHEMA["$defs"]["OptimConfig"]["properties"]
    offered, second = optim["name"]["anyOf"]
    assert {"adamw", "muon"} <= set(offered["enum"]) and "file.py:name" in second["examples"]
    assert optim["name"]["default"] == "adamw"
    for name in ("muon", "optax:adan", "an_entry_point"):
        assert VALIDATOR.is_valid({"optim": {"name": name}})
    assert not VALIDATOR.is_valid({"optim": {"name": 3}})


def test_the_file_is_up_to_date_and_written_by_the_verb(tmp_path, capsys):
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    assert (ROOT / "docs/schema.json").read_text() == render_schema(), "run `make docs`"
    path = tmp_path / "schema.json"
    assert main(["schema", "--output", str(path)]) == 0
    assert json.loads(path.read_text()) == SCHEMA
    assert main(["schema", "--output", str(path)]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert all(
        field.get("description") for field in SCHEMA["$defs"]["RunConfig"]["properties"].values()
    )
