"""A model that mixes tokens other than by attention refuses trees with shared prefixes."""

import dataclasses
import tomllib
from importlib.resources import files

import pytest

from jaxtrain.config import validate_config
from jaxtrain.errors import UserError
from jaxtrain.models.qwen3 import Config as Qwen3
from jaxtrain.tasks import make_task
from jaxtrain.tasks.tree import check_trees


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recurrent(Qwen3):
    """Stands for a family with linear attention; none exists here."""

    mixes_by_attention_only = False


def tree_config(kind="tree", path="builtin:caterpillar", **task):
    tiny = tomllib.loads((files("jaxtrain") / "presets/model/tiny.toml").read_text())
    table = {
        "model": tiny,
        "data": {"datasets": [{"path": path}]},
        "task": {"kind": kind, **task},
        "run": {"max_steps": 1},
        "sampling": {"temperature": 1.0},
    }
    return validate_config(table, "test")


def recurrent(config):
    return Recurrent.from_hf(config.model.architecture)


def test_tree_mode_is_refused_naming_a_way_out():
    config = tree_config()
    with pytest.raises(UserError, match=r'task.mode "tree".* Qwen3ForCausalLM.*grouped'):
        check_trees(config, recurrent(config))


@pytest.mark.parametrize("mode", ["grouped", "per_branch", "current_rl", "flat"])
def test_modes_of_flat_rows_pass_unless_whole_trees_are_evaluated(mode):
    config = tree_config(mode=mode, units_per_step=2)
    check_trees(config, recurrent(config))
    held_out = [*config.data.datasets]
    data = config.data.model_copy(update={"eval_datasets": held_out})
    config = config.model_copy(update={"data": data})
    with pytest.raises(UserError, match="data.eval_datasets"):
        check_trees(config, recurrent(config))


@pytest.mark.parametrize("task", [{"kind": "tree"}, {"kind": "rl"}])
def test_every_task_that_packs_trees_checks(monkeypatch, task):
    path = "builtin:caterpillar" if task["kind"] == "tree" else "builtin:calculator"
    config = tree_config(path=path, **task)
    make_task(config)
    monkeypatch.setattr(Qwen3, "mixes_by_attention_only", False)
    with pytest.raises(UserError, match="mix tokens other than by attention"):
        make_task(config)
