"""Reinforcement learning with a reward model on the training devices, through the front door."""

import json

import numpy as np
import pytest
from toy_run import MODEL

from jaxtrain.api import Model
from jaxtrain.config import load_config
from jaxtrain.data.chat.template import load_tokenizer
from jaxtrain.errors import UserError
from jaxtrain.main import main
from jaxtrain.models import build, families, saving
from jaxtrain.models.scores import ScoreHead

ARCHITECTURE = {
    **dict(architectures=["Qwen3ForCausalLM"], model_type="qwen3", vocab_size=512),
    **dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2),
    **dict(num_key_value_heads=1, head_dim=8, max_position_embeddings=64, initializer_range=0.5),
    **dict(tie_word_embeddings=True),
}


def save_model(folder, head):
    config = families.with_score(families.config_from_hf(ARCHITECTURE), head)
    saving.save(build.init(config, 0), config, folder)
    load_tokenizer("builtin").save_pretrained(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A reward model, prompts, and a config without [[rewards]]."""
    folder = tmp_path_factory.mktemp("judge")
    save_model(folder / "rm", ScoreHead("sequence", ("reward",)))
    (folder / "lm").mkdir()
    (folder / "lm" / "config.json").write_text(json.dumps(ARCHITECTURE))
    load_tokenizer("builtin").save_pretrained(folder / "lm")
    rows = [{"prompt": f"say {number}"} for number in range(8)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.toml").write_text(
        f"""{MODEL}
[run]
max_steps = 2
export = false
[data]
sequence_len = 64
datasets = [{{ path = "{folder / "rows.jsonl"}" }}]
[task]
kind = "rl"
[rollout]
prompts_per_step = 2
group_size = 2
samples = "all"
[sampling]
temperature = 1.0
max_new_tokens = 6
[optim]
learning_rate = 1e-2
"""
    )
    return folder


def read(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_judges_alone_give_what_is_learned_from(folder, tmp_path):
    save_model(folder / "prm", ScoreHead("token", ("wrong", "right")))
    words = [f"run.output_dir={tmp_path}", "log.plot=false"]
    for index, kind in enumerate(("rm", "prm")):
        words += [f"rewards.{index}.model.path={folder / kind}", f"rewards.{index}.name={kind}"]
        words += [f"rewards.{index}.model.compute_dtype=float32"]
    assert main(["--config", str(folder / "config.toml"), *words]) == 0
    lines = [line for line in read(tmp_path) if "loss" in line]
    assert len(lines) == 2
    for line in lines:
        assert line["rewards/rm/std"] > 0 and line["grad_norm"] > 0
        total = line["rewards/rm/mean"] + line["rewards/prm/mean"]
        assert line["reward"] == pytest.approx(total)
        assert 0 < line["rewards/prm/mean"] < 1


@pytest.mark.parametrize(
    ("words", "output"),
    [
        (["rewards.0.name=x"], "either function or model"),
        (["rewards.0.model.path=rm", "rewards.0.options.a=1"], "options are for a function"),
        (["rewards.0.model.path=rm", "rollout.replay_size=4"], "rollout.replay_size"),
        (["rewards.0.model.path=rm", "task.kind=sft"], "vllm_reward"),
    ],
)
def test_models_that_cannot_judge_are_told(folder, words, output):
    with pytest.raises(UserError, match=output):
        load_config(str(folder / "config.toml"), words)


def test_a_language_model_is_no_judge(folder, capsys):
    words = [f"rewards.0.model.path={folder / 'lm'}", "--dry-run"]
    assert main(["--config", str(folder / "config.toml"), *words]) == 2
    assert "gives no scores" in capsys.readouterr().err


def test_programs_score_texts(folder):
    model = Model(folder / "rm")
    entry, two = model.scores([[5, 6, 7], [5, 6]])
    assert entry.shape == (3, 1) and two.shape == (2, 1)
    np.testing.assert_allclose(entry[:2], two, atol=1e-6)
    with pytest.raises(UserError, match="writes none"):
        model.logits([[5]])
