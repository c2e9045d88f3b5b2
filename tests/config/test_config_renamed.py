"""Keys and values of earlier versions are read under their current names, with one note each."""

import json
import logging

import pytest

from jaxtrain.config.base import note_renamed
from jaxtrain.config.load import validate_config
from jaxtrain.config.root import is_resumable
from jaxtrain.errors import UserError
from jaxtrain.runs.folder import read_config

BASE = {
    "run": {"max_steps": 1},
    "model": {"architecture": {"hidden_size": 8}, "tokenizer": "builtin"},
    "data": {"datasets": [{"path": "a"}]},
}
SAMPLED = {"sampling": {"temperature": 1.0}, "rewards": [{"function": "math"}]}
TEACHER = {"kind": "distillation", "teacher": {"path": "b"}, "top_k": 4}

RENAMED = [
    ({"task": {"kind": "tree", "normalise": "tree"}}, "task.normalize", "tree"),
    ({"task": {"kind": "diffusion", "normalise": "token"}}, "task.normalize", "token"),
    ({"task": {**TEACHER, "rest": "renormalise"}}, "task.rest", "renormalize"),
    (
        {"task": {"kind": "rl", "normalise_advantages": False}, **SAMPLED},
        "task.normalize_advantages",
        False,
    ),
    (
        {"task": {"kind": "rl", "combine_rewards": "sum_then_normalise"}, **SAMPLED},
        "task.combine_rewards",
        "sum_then_normalize",
    ),
    (
        {"data": {"datasets": [{"path": "a", "pairing": "neighbours"}]}},
        "data.datasets.0.pairing",
        "neighbors",
    ),
]


def get(config, key):
    for part in key.split("."):
        config = config[int(part)] if part.isdigit() else getattr(config, part)
    return config


@pytest.mark.parametrize("sections, key, value", RENAMED, ids=[key for _, key, _ in RENAMED])
def test_old_names_are_read_and_noted(sections, key, value, caplog, tmp_path):
    note_renamed.cache_clear()
    with caplog.at_level(logging.WARNING):
        config = validate_config({**BASE, **sections}, "c.toml")
    assert get(config, key) == value
    assert [record.message.split(";")[1] for record in caplog.records] == [
        " the old name is still read"
    ]
    # The same keys in the config.json of an older run: it may be resumed by the current ones.
    (tmp_path / "config.json").write_text(json.dumps({**BASE, **sections}))
    expected = config.model_dump(mode="json")
    expected["run"]["output_dir"] = str(tmp_path)  # where the file is
    assert read_config(tmp_path / "config.json") == expected


def test_an_old_name_beside_the_current_one_is_refused():
    task = {"kind": "tree", "normalise": "tree", "normalize": "tree"}
    with pytest.raises(UserError, match="normalise is the old name of normalize; keep one"):
        validate_config({**BASE, "task": task}, "c.toml")


@pytest.mark.parametrize(
    "key, kind, free",
    [
        ("log.every", "sft", True),
        ("observers.0.options.metric", "sft", True),
        ("rewards.2.timeout", "rl", True),
        ("data.datasets.0.env.gym.port", "rl", True),
        ("rollout.vllm.sync_seconds", "rl", True),
        ("task.target.queue", "eagle3", True),
        ("env.options.timeout", "rl", False),
        ("policies.log.path", "rl", False),
        ("task.loss", "eagle3", False),
        ("task.target.queue", "sft", False),
        ("model.path", "sft", False),
        ("no.such.key", "sft", False),
    ],
)
def test_which_keys_may_change_is_a_flag_on_the_key(key, kind, free):
    assert is_resumable(key, kind) is free
