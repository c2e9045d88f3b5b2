"""Conflicts between section rollout.ray and its companions."""

import sys

import pytest

from jaxtrain.config import load_config
from jaxtrain.config.ray import RayConfig, service_name
from jaxtrain.errors import UserError
from jaxtrain.generation.ray.ray_cluster import join

RL = """
[run]
max_steps = 1
[model]
path = "m"
[task]
kind = "rl"
[[data.datasets]]
path = "builtin:calculator"
[sampling]
max_new_tokens = 8
temperature = 1.0
[env]
kind = "calculator"
[rollout]
engine = "vllm"
"""
SERVED = 'rollout.vllm.servers=["http://127.0.0.1:8000"]'


@pytest.mark.parametrize(
    ("words", "output"),
    [
        (["rollout.service=rya", SERVED], "'rya' is none of"),
        (["rollout.service=ray://", SERVED], "is none of"),
        (["rollout.service=ray", "rollout.engine=local"], "cannot use the local engine"),
        (["rollout.ray.episode_workers=4", SERVED], "rollout.ray.episode_workers has no effect"),
        (["rollout.vllm.launch=ray", "rollout.vllm.sleep=true"], "GPUs of their own"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, words, output):
    (tmp_path / "c.toml").write_text(RL)
    with pytest.raises(UserError) as error:
        load_config(tmp_path / "c.toml", words)
    assert output in str(error.value)


@pytest.mark.parametrize(
    "words", [["rollout.service=ray://a", SERVED], ["rollout.vllm.launch=ray"]]
)
def test_what_can_be_is_taken(tmp_path, words):
    (tmp_path / "c.toml").write_text(RL)
    config = load_config(tmp_path / "c.toml", [*words, "rollout.ray.episode_workers=4"])
    assert config.rollout.ray.episode_workers == 4
    assert service_name(config.rollout.service) in ("a", None)


def test_a_missing_ray_is_said_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"pip install \"jaxtrain\[cluster\]\""):
        join(RayConfig())
