"""Exact rollouts through the front door: in every round the compiled step computes the sampler's
log-probs, to the bit; what cannot be so is refused."""

import dataclasses
import json

import jax
import pytest
from toy_run import EVEN_TOKENS, MODEL

from jaxtrain.config.load import load_config
from jaxtrain.core import scorer
from jaxtrain.errors import UserError
from jaxtrain.main import main
from jaxtrain.methods.rl.method import make

CONFIG = f"""
[run]
max_steps = 4
export = false
{MODEL}
[data]
sequence_len = 64
micro_batch_size = 1

[[data.datasets]]
path = "builtin:calculator"
options = {{ num_rows = 200 }}

[task]
kind = "rl"

[rollout]
prompts_per_step = 4
group_size = 4
exact = true

{EVEN_TOKENS}
[optim]
learning_rate = 1e-2
lr_scheduler = "constant"

[log]
plot = false
"""


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    devices = jax.devices
    monkeypatch.setattr(jax, "devices", lambda *backend: devices(*backend)[:1])


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "rl.toml"
    path.write_text(CONFIG)
    return path


def run(config, folder, *words) -> list[dict]:
    assert main(["--config", str(config), f"run.output_dir={folder}", *words]) == 0
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


def check(lines, updates=1):
    for step, line in enumerate(lines):
        if step % updates == 0:
            assert (line["mismatch/exact"], line["mismatch/max_abs"]) == (1.0, 0.0)
            assert line["ratio/min"] == line["ratio/max"] == 1.0
            assert line["sampling/sampling_logp_difference/max"] == 0.0


def test_every_round_begins_at_the_samplers_log_probs(config, tmp_path, monkeypatch, capsys):
    """Two updates a round, so that the fast path would score the policy before the first one."""
    monkeypatch.setattr(scorer, "make_logp", None)
    lines = run(config, tmp_path / "run", "task.num_minibatches=2", "run.max_steps=6")
    assert len(lines) == 6
    check(lines, updates=2)
    # Weights have moved: the second update of a round does not meet its sampler any more.
    assert any(line["ratio/max"] != 1.0 for line in lines[1::2])
    assert "mismatch/exact" not in lines[1]
    assert "old log-probs are the sampler's" in capsys.readouterr().out
