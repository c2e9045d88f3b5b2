"""A model with a layer that runs along the row refuses whatever packs several things into one."""

import tomllib
from importlib.resources import files

import pytest

from jaxtrain.config import validate_config
from jaxtrain.errors import UserError
from jaxtrain.layers.attention import Attention
from jaxtrain.methods.registry import make_task


@pytest.fixture
def recurrent(monkeypatch):
    """Attention stands for a layer that runs along the row."""
    monkeypatch.setattr(Attention, "follows_trees", False)


def config(kind, data=None, **task):
    tiny = tomllib.loads((files("jaxtrain") / "presets/model/tiny.toml").read_text())
    path = "builtin:caterpillar" if kind == "tree" else "builtin:calculator"
    table = {
        "model": tiny,
        "data": {"datasets": [{"path": path}], **(data or {})},
        "task": {"kind": kind, **task},
        "run": {"max_steps": 1},
        "sampling": {"temperature": 1.0},
    }
    if kind == "rl":
        table["env"] = {"kind": "calculator"}
    return validate_config(table, "test")


HELD_OUT = {"packing": False, "eval_datasets": [{"path": "builtin:caterpillar"}]}
ALONE = {"packing": False}


@pytest.mark.parametrize(
    ("message", "settings"),
    [
        ('task.mode "tree".*Qwen3ForCausalLM.*grouped', {"kind": "tree", "data": ALONE}),
        (
            "data.eval_datasets.*remove",
            {"kind": "tree", "mode": "grouped", "units_per_step": 2, "data": HELD_OUT},
        ),
        ("data.packing", {"kind": "tree", "mode": "flat"}),
        ("data.packing.*to false", {"kind": "sft"}),
        ("task.share_prompts.*to false", {"kind": "rl", "data": ALONE}),
        ("data.packing.*to false", {"kind": "rl", "share_prompts": False}),
    ],
)
def test_what_packs_is_refused_naming_a_way_out(recurrent, message, settings):
    with pytest.raises(UserError, match=message):
        make_task(config(**settings))


@pytest.mark.parametrize(
    "settings",
    [
        {"kind": "sft"},
        {"kind": "tree", "mode": "grouped", "units_per_step": 2},
        {"kind": "rl", "share_prompts": False},
    ],
)
def test_rows_of_one_thing_pass(recurrent, settings):
    make_task(config(**settings, data=ALONE))
