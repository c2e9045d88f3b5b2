"""A model with a layer that does not follow trees refuses those with shared prefixes."""

import tomllib
from importlib.resources import files

import pytest

from jaxtrain.config import validate_config
from jaxtrain.core.assemble import assemble, check_trees
from jaxtrain.errors import UserError
from jaxtrain.layers.attention import Attention
from jaxtrain.models import build


@pytest.fixture(autouse=True)
def recurrent(monkeypatch):
    """Attention stands for a layer that runs along the row."""
    monkeypatch.setattr(Attention, "follows_trees", False)


def tree_config(kind="tree", path="builtin:caterpillar", **task):
    tiny = tomllib.loads((files("jaxtrain") / "presets/model/tiny.toml").read_text())
    table = {
        "model": tiny,
        "data": {"datasets": [{"path": path}]},
        "task": {"kind": kind, **task},
        "run": {"max_steps": 1},
    }
    return validate_config(table, "test")


def architecture(config):
    return build.config_from_hf(config.model.architecture)


@pytest.mark.parametrize("model", ["model.architecture", "model.path"])
def test_tree_mode_is_refused_naming_both_keys(model):
    config = tree_config()
    sizes = architecture(config)
    if model == "model.path":
        section = config.model.model_copy(update={"path": "somewhere", "architecture": None})
        config = config.model_copy(update={"model": section})
    with pytest.raises(UserError, match=rf'task.mode "tree".*{model} is Qwen3ForCausalLM.*grouped'):
        check_trees(config, sizes)


@pytest.mark.parametrize("mode", ["grouped", "per_branch", "current_rl", "flat"])
def test_modes_of_flat_rows_pass_unless_whole_trees_are_evaluated(mode):
    config = tree_config(mode=mode, units_per_step=2)
    check_trees(config, architecture(config))
    held_out = [*config.data.datasets]
    data = config.data.model_copy(update={"eval_datasets": held_out})
    config = config.model_copy(update={"data": data})
    with pytest.raises(UserError, match="data.eval_datasets.*model.architecture"):
        check_trees(config, architecture(config))


def test_sft_does_not_care():
    config = tree_config("sft", "builtin:calculator")
    check_trees(config, architecture(config))


def test_the_check_is_part_of_assembly(monkeypatch):
    with pytest.raises(UserError, match="from one branch or document of a row to the next"):
        assemble(tree_config())
    monkeypatch.undo()
    assemble(tree_config())
