"""Multi-token prediction heads in whole runs: SFT and RL from the command line, folders, and what
is refused."""

import json
import re

import numpy as np
import pytest
from safetensors.numpy import load_file
from toy_run import EVEN_TOKENS, MODEL

from jaxtrain.main import main
from tests.docs.metric_names import require_rows

QWEN = """
architectures = ["Qwen3_5ForCausalLM"]
model_type = "qwen3_5_text"
layer_types = ["full_attention"]
linear_num_key_heads = 1
linear_num_value_heads = 1
linear_key_head_dim = 8
linear_value_head_dim = 8
linear_conv_kernel_dim = 2
"""
HEAD = MODEL.replace('architectures = ["Qwen3ForCausalLM"]\nmodel_type = "qwen3"\n', QWEN)
REWARDS = "task={ kind = 'reward_model' }"
SFT = """
[run]
max_steps = 3

[data]
sequence_len = 64
micro_batch_size = 2
too_long = "truncate"

[[data.datasets]]
path = "builtin:calculator"
options = { num_rows = 100 }
train_on = "all"

[optim]
gradient_accumulation_steps = 2
learning_rate = 1e-3
max_grad_norm = 0.05
weight_decay = 0.1

[log]
plot = false
every = 1
"""
RL = (
    SFT.replace("max_steps = 3", "max_steps = 2")
    .replace('too_long = "truncate"', "")
    .replace('train_on = "all"', "")
    .replace("gradient_accumulation_steps = 2", "")
) + '[task]\nkind = "rl"\n[rollout]\nprompts_per_step = 2\ngroup_size = 4\n'


def run(folder, text, *words):
    path = folder.with_suffix(".toml")
    path.write_text(text)
    assert main(["--config", str(path), f"run.output_dir={folder}", *words]) == 0
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


def read(folder):
    return load_file(folder / "model" / "model.safetensors")


@pytest.mark.slow
def test_a_decoupled_head_trains_and_the_model_moves_as_without_it(tmp_path, capsys):
    """Over three clipped steps of two microsteps, to the rounding of sums over devices; a head that
    trains is not stale, and trains further from the export."""
    plain = run(tmp_path / "plain", HEAD + SFT)
    beside = run(tmp_path / "beside", HEAD + SFT, "model.mtp.train=decoupled")
    require_rows(tmp_path / "beside")
    before, after = read(tmp_path / "plain"), read(tmp_path / "beside")
    for name, value in before.items():
        np.testing.assert_allclose(after[name], value, rtol=0, atol=1e-6, err_msg=name)
    heads = after.keys() - before.keys()
    assert len(heads) == 15 and all(name.startswith("mtp.") for name in heads)
    for line, head_line in zip(plain, beside, strict=True):
        np.testing.assert_allclose(head_line["grad_norm"], line["grad_norm"], rtol=1e-6)
    capsys.readouterr()
    words = ["--config", str(tmp_path / "beside.toml"), "model.mtp.train=decoupled", "--dry-run"]
    assert main(words) == 0
    counted = re.search(r"parameters +│ +([\d,]+)", capsys.readouterr().out)
    assert counted and int(counted[1].replace(",", "")) == sum(x.size for x in after.values())
    losses = [line["mtp/nll"] for line in beside]
    assert losses[2] < losses[0]
    for line, head_line in zip(plain, beside, strict=True):
        np.testing.assert_allclose(
            head_line["loss"], line["loss"] + 0.1 * head_line["mtp/nll"], rtol=1e-5
        )
    capsys.readouterr()
    folder = tmp_path / "beside" / "model"
    assert json.loads((folder / "config.json").read_text())["mtp_num_hidden_layers"] == 1
    words = [f"model.path={folder}", "run.max_steps=1"]
    start = SFT.replace("[run]", '[model]\ncompute_dtype = "float32"\n\n[run]')
    (first,) = run(tmp_path / "further", start, *words, "model.mtp.train=joint")
    assert first["mtp/nll"] < losses[0]
    assert "guess from hidden states" not in capsys.readouterr().out
    run(tmp_path / "stale", start, *words)
    assert "15 tensors (mtp.*) guess from hidden states" in capsys.readouterr().out
    stale = read(tmp_path / "stale")
    assert all(stale[name].tobytes() == after[name].tobytes() for name in heads)


@pytest.mark.thorough
def test_a_head_trains_beside_rl(tmp_path):
    for mode in ("none", "decoupled"):
        run(tmp_path / mode, HEAD + RL + EVEN_TOKENS, f"model.mtp.train={mode}")
    require_rows(tmp_path / "decoupled")
    # The head guesses for the sampler: the same answers, and so the same steps.
    words = ["model.mtp.train=decoupled", "rollout.draft=mtp"]
    lines = run(tmp_path / "drafted", HEAD + RL + EVEN_TOKENS, *words)
    assert all("draft/tau" in line for line in lines), lines[0].keys()
    plain, drafted = read(tmp_path / "decoupled"), read(tmp_path / "drafted")
    for name, value in plain.items():
        np.testing.assert_allclose(drafted[name], value, rtol=0, atol=1e-6, err_msg=name)
    before, after = read(tmp_path / "none"), read(tmp_path / "decoupled")
    for name, value in before.items():
        np.testing.assert_allclose(after[name], value, rtol=0, atol=1e-6, err_msg=name)
    assert after.keys() - before.keys()


@pytest.mark.parametrize(
    "model, words, message",
    [
        (MODEL, [], "Qwen3ForCausalLM has no multi-token prediction head"),
        (HEAD, ["adapter.kind=lora"], "trains the head in full, and adapter.kind 'lora'"),
        (HEAD, [REWARDS, "data.too_long=drop"], "a model that scores texts predicts no tokens"),
        (HEAD, ["task={ kind = 'diffusion' }"], "predicts no next token"),
    ],
)
def test_a_head_that_cannot_train_is_refused(model, words, message, tmp_path, capsys):
    path = tmp_path / "run.toml"
    path.write_text(model + SFT)
    words = ["model.mtp.train=joint", f"run.output_dir={tmp_path / 'run'}", *words]
    assert main(["--config", str(path), *words]) != 0
    error = capsys.readouterr().err
    assert message in " ".join(error.split()), error
    assert 'model.mtp.train "joint"' in error


@pytest.mark.parametrize(
    ("model", "words", "message"),
    [
        (MODEL, [], "Qwen3ForCausalLM has no multi-token prediction head that is computed here"),
        (HEAD, [], "rollout.draft mtp: the model's folder has no multi-token prediction head"),
        (
            HEAD,
            ['rollout.draft_refresh.task={kind = "dflash"}', "model.mtp.train=joint"],
            'trains the folder of a draft, not rollout.draft "mtp"',
        ),
    ],
)
def test_a_head_that_cannot_guess_for_the_sampler_is_refused(
    model, words, message, tmp_path, capsys
):
    path = tmp_path / "run.toml"
    path.write_text(model + RL + EVEN_TOKENS)
    words = ["rollout.draft=mtp", f"run.output_dir={tmp_path / 'run'}", *words]
    assert main(["--config", str(path), *words]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert message in error and "rollout.draft" in error, error


def test_a_wrong_number_of_heads_is_named(tmp_path, capsys):
    path = tmp_path / "run.toml"
    path.write_text(HEAD.replace(QWEN, f'{QWEN}mtp_num_hidden_layers = "one"\n') + SFT)
    words = ["model.mtp.train=joint", f"run.output_dir={tmp_path / 'run'}"]
    assert main(["--config", str(path), *words]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert 'mtp_num_hidden_layers is a text, "one", not a number of heads' in error, error
