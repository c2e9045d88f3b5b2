"""Every config in the documentation is one: fragments are laid over a whole."""

import tomllib
from typing import Any

import jsonschema
import pytest

from jaxtrain.config.load import validate_config
from jaxtrain.config.schema import make_schema
from jaxtrain.runs.sweep.space import check_sweep, check_trials, list_checked
from tests.docs.blocks import ROOT, list_blocks

WHOLE: dict[str, Any] = {
    "run": {"max_steps": 10},
    "model": {"path": "Qwen/Qwen3-0.6B"},
    "data": {"datasets": [{"path": "train.jsonl"}]},
}
"""What a fragment of a page is completed with, where it does not say it itself."""
RL: dict[str, Any] = {
    "task": {"kind": "rl"},
    "sampling": {"temperature": 1.0},
    "rewards": [{"function": "exact_match"}],
}
"""With what RL needs, where the fragment has one of its sections."""
DRAFT = {"task": {"kind": "dflash"}}

TABLES = [
    pytest.param(tomllib.loads(block.text), block.page, id=block.place)
    for block in list_blocks()
    if block.language == "toml" and not block.text.startswith(("# pyproject.toml", "[sweep]"))
]
SCHEMA = jsonschema.Draft7Validator(make_schema())


def complete(table: dict[str, Any]) -> dict[str, Any]:
    """The table with what makes it a whole config."""
    base = WHOLE
    task = table.get("task", {})
    if "kind" not in task and {"rollout", "env", "rewards"} & set(table):
        if "eval_datasets" in table.get("data", {}):
            return lay(table, WHOLE)
        base = {**WHOLE, **RL}
        if table.get("env"):
            base.pop("rewards")
        rollout = table.get("rollout", {})
        base["rollout"] = {"engine": "vllm"} if "vllm" in rollout else {}
        if "draft_refresh" in rollout:
            base["rollout"]["draft"] = "runs/draft/model"
    elif "kind" not in task and {"draft", "target"} & set(task):
        base = {**WHOLE, **DRAFT}
    return lay(table, base)


def lay(above: dict[str, Any], below: dict[str, Any]) -> dict[str, Any]:
    """above over below, section by section."""
    full = dict(below)
    for key, value in above.items():
        old = full.get(key)
        full[key] = lay(value, old) if isinstance(value, dict) and isinstance(old, dict) else value
    if "num_epochs" in above:
        full.pop("max_steps", None)
    return full


@pytest.mark.parametrize("table, page", TABLES)
def test_config_of_a_page_loads(table, page, monkeypatch):
    monkeypatch.chdir(ROOT)
    full = complete(table)
    validate_config(full, page)
    assert not [error.message for error in SCHEMA.iter_errors(full)]


def test_sweeps_of_pages_are_sweeps(monkeypatch):
    monkeypatch.chdir(ROOT)
    actual = [block for block in list_blocks() if block.text.startswith("[sweep]")]
    assert actual
    for block in actual:
        file = check_sweep(tomllib.loads(block.text), block.place)
        check_trials(file, list_checked(file))


def test_a_key_that_is_none_is_found():
    with pytest.raises(ValueError, match="unknown key"):
        validate_config(complete({"rollout": {"group_sise": 8}}), "page")
