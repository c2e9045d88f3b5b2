"""Reinforcement learning with a draft is the run without one: the same answers, the same losses."""

import json
import sys
from pathlib import Path

import pytest
from test_methods_rl import CONFIG

from jaxtrain.config import load_config
from jaxtrain.errors import UserError
from jaxtrain.main import main

sys.path.append(str(Path(__file__).parents[1] / "generation"))
import test_generation_drafts as drafts

TARGET = {
    **{key: value for key, value in drafts.TARGET.items() if key != "initializer_range"},
    "num_hidden_layers": 1,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
"""The policy of toy_run.MODEL."""
CLOCKS = ("time", "seconds", "per_second", "memory", "mfu", "tflops")
ROUNDINGS = "mismatch/exact"
"""Share of log-probs that two programs round alike."""


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "rl.toml"
    path.write_text(CONFIG)
    return path


@pytest.mark.slow
def test_answers_and_losses_are_those_without_a_draft(config, tmp_path):
    inner = {"mask_token_id": 500, "target_layer_ids": [0]}
    draft = drafts.save(drafts.make_dflash(TARGET, dflash_config=inner), 1, tmp_path / "draft")
    common = ("run.max_steps=3", "rollout.samples=all", "optim.name=sgd")
    actual = []
    for name, words in (("plain", ()), ("drafted", (f"rollout.draft={draft}",))):
        folder = tmp_path / name
        assert main(["--config", str(config), f"run.output_dir={folder}", *common, *words]) == 0
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
        samples = [json.loads(line) for line in (folder / "samples.jsonl").open()]
        actual.append(([line for line in lines if "loss" in line], samples))
    (plain, plain_samples), (drafted, samples) = actual
    assert [entry["completion"] for entry in samples] == [
        entry["completion"] for entry in plain_samples
    ]
    for entry, second in zip(plain, drafted, strict=True):
        assert 1 <= second["draft/tau"] <= 4 and second["draft/cycles"] > 10
        for key in entry.keys() - {ROUNDINGS}:
            if not any(clock in key for clock in CLOCKS) and isinstance(entry[key], float):
                # The sampler's log-probs are rounded otherwise.
                assert entry[key] == pytest.approx(second[key], rel=1e-3, abs=1e-5), key
        assert second["sampling/sampling_logp_difference/max"] < 1e-4


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["rollout.draft_rows=4"], "rollout.draft_rows needs rollout.draft"),
        (["rollout.replay_logp=recomputed"], "no effect while rollout.replay_size is 0"),
        (
            ["rollout.draft=x", "rollout.engine=vllm", 'rollout.vllm.servers=["http://a:1"]'],
            "rollout.draft is for the local engine: .*--speculative-config",
        ),
    ],
)
def test_conflicts_are_named(config, words, expected):
    with pytest.raises(UserError, match=expected):
        load_config(str(config), words)


def test_a_draft_of_another_policy_is_refused_before_anything_is_loaded(config, tmp_path, capsys):
    draft = drafts.save(drafts.make_dflash(TARGET, hidden_size=64), 1, tmp_path / "draft")
    words = [f"run.output_dir={tmp_path / 'run'}", f"rollout.draft={draft}", "--dry-run"]
    assert main(["--config", str(config), *words]) == 2
    assert "rollout.draft reads states of 64 features" in capsys.readouterr().err
