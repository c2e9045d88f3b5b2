"""The section of tree training: one message for each impossible setting."""

import pytest

from jaxtrain.config import validate_config
from jaxtrain.errors import UserError
from jaxtrain.methods.trees.config import TreeTask


def validate(data=None, dataset=None, **task):
    table = {
        "model": {"architecture": {"model_type": "qwen3"}, "tokenizer": "builtin"},
        "data": {"datasets": [{"path": "x.jsonl", **(dataset or {})}], **(data or {})},
        "task": {"kind": "tree", **task},
        "run": {"max_steps": 1},
    }
    return validate_config(table, "test")


def test_a_tree_task_is_read():
    task = validate(mode="per_branch", units_per_step=4).task
    assert isinstance(task, TreeTask) and task.mode == "per_branch"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data": {"sequence_len": 8 + 8}, "max_packed_tokens": 15}, "task.max_packed_tokens 15"),
        ({"train_response": False, "train_reasoning": False}, "nothing would train"),
        ({"mode": "grouped"}, "needs task.units_per_step"),
        ({"mode": "grouped", "units_per_step": 2, "normalize": "tree"}, "task.normalize tree"),
        ({"units_per_step": 2, "data": {"global_batch_size": 8}}, "are both set"),
        ({"split": "think", "selection": "num_turns"}, "task.split think"),
        ({"split": "think", "rendering": "chatml"}, "task.split think"),
        ({"data": {"too_long": "truncate"}}, "data.too_long truncate"),
        ({"dataset": {"streaming": True}, "group_by": "task_id"}, "task.group_by needs all rows"),
        ({"dataset": {"streaming": True}, "max_examples": 3}, "task.max_examples needs all rows"),
        ({"dataset": {"path": "builtin:caterpillar"}, "group_by": "x"}, "which 'builtin:caterp"),
        ({"kind": "sft", "dataset": {"path": "builtin:caterpillar"}}, 'task.kind to "tree"'),
        ({"mod": "tree"}, "task.mod: unknown key 'mod'; did you mean 'mode'"),
        ({"mode": "trees"}, "task.mode: .*'per_branch'"),
        ({"kind": "forest"}, "no 'forest'; built in: sft, dflash"),
    ],
)
def test_impossible_settings_are_refused_in_a_line(settings, message):
    with pytest.raises(UserError, match=message) as caught:
        validate(**settings)
    assert len(str(caught.value).splitlines()) == 2  # the file, then the problem
