"""Reinforcement learning in real processes: process 0 samples, all train what one would train."""

import json
from pathlib import Path

import pytest
from test_parallel_processes import finish, output, start

from jaxtrain.main import main

ENV = Path(__file__).parents[1] / "train" / "rl_toy_env.py"
CONFIG = f"""
[run]
max_steps = 4
export = false

[model]
tokenizer = "builtin"
compute_dtype = "float32"

[model.architecture]
architectures = ["Qwen3ForCausalLM"]
model_type = "qwen3"
vocab_size = 512
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 1
head_dim = 16
max_position_embeddings = 64
tie_word_embeddings = false

[parallel]
data = 1
fsdp = -1

[data]
sequence_len = 64

[[data.datasets]]
path = "builtin:calculator"
options = {{ num_rows = 100 }}

[task]
kind = "rl"
objective = "dapo"
num_minibatches = 2
beta = 0.01

[rollout]
prompts_per_step = 4
group_size = 4

[env]
kind = "python"
path = "{ENV}:EvenTokens"

[sampling]
temperature = 1.0
max_new_tokens = 8

[optim]
learning_rate = 1e-2
lr_scheduler = "constant"

[eval]
at_start = true

[[eval.sets]]
path = "builtin:calculator"
name = "even"
k = 2
threshold = 0.5
options = {{ num_rows = 6 }}

[log]
plot = false
console = "plain"
"""


def numbers(folder: Path) -> list[dict]:
    """metrics.jsonl without what a clock or the memory says."""
    timed = ("seconds", "per_second", "time", "memory", "mfu", "tflops", "sampling/", "mismatch/")
    lines = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    return [
        {key: value for key, value in line.items() if not any(word in key for word in timed)}
        for line in lines
    ]


def test_two_processes_train_and_evaluate_what_one_does(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    running = start(two, 2, config_text=CONFIG)
    code = main(["--config", str(two / "config.toml"), f"run.output_dir={one / 'run'}"])
    assert finish(running) == [0, 0], output(two, 0) + output(two, 1)
    assert code == 0
    expected, found = numbers(one), numbers(two)
    assert [line["step"] for line in found] == [0, 1, 2, 3, 4, 4]
    assert found[0]["eval/even/mean_length"] > 0 and found[1]["reward_std"] > 0
    for a, b in zip(expected, found, strict=True):
        # The same tokens; sums over devices in another order round differently in float32.
        assert b == pytest.approx(a, rel=1e-4, abs=1e-6)
    assert (one / "run" / "samples.jsonl").read_text() == (
        two / "run" / "samples.jsonl"
    ).read_text()
