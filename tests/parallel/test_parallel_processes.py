"""Real processes on this machine, through the command line: one loss, one line when one ends.

They talk over gloo, as GPUs would over NCCL; each has two fake devices.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxtrain.parallel.hub import free_port

ROOT = Path(__file__).parents[2]
CONFIG = """
[run]
max_steps = 6
export = false

[model]
init = "random"
tokenizer = "builtin"
compute_dtype = "float32"

[model.architecture]
architectures = ["Qwen3ForCausalLM"]
model_type = "qwen3"
vocab_size = 512
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 2
head_dim = 16
max_position_embeddings = 512
tie_word_embeddings = true

[data]
sequence_len = 128
global_batch_size = 8

[[data.datasets]]
path = "builtin:calculator"
options = { num_rows = 200 }

[optim]
learning_rate = 3e-3

[checkpoint]
every = 2

[log]
plot = false
console = "plain"
"""


def start(folder: Path, count: int, *overrides: str, devices: int = 2, environs=None):
    """`count` processes of one run in folder/run; their output goes to folder/<i>.txt."""
    folder.mkdir(exist_ok=True)
    config = folder / "config.toml"
    config.write_text(CONFIG)
    port, running = free_port(), []
    for process in range(count):
        environ = {
            **os.environ,
            "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
            "PYTHONUNBUFFERED": "1",
            **(environs[process] if environs else {}),
        }
        words = [f"run.output_dir={folder / 'run'}", *overrides]
        if environs is None:
            words += [f"parallel.coordinator=localhost:{port}", f"parallel.num_processes={count}"]
            words += [f"parallel.process_id={process}"]
        command = [sys.executable, "-m", "jaxtrain.main", "--config", str(config), *words]
        with (folder / f"{process}.txt").open("w") as output:
            running.append(
                subprocess.Popen(
                    command, cwd=folder, env=environ, stdout=output, stderr=subprocess.STDOUT
                )
            )
    return running


def finish(running: list[subprocess.Popen], seconds: float = 240) -> list[int]:
    """Exit codes of all of them; nobody is left behind."""
    last = time.monotonic() + seconds
    try:
        return [process.wait(max(last - time.monotonic(), 1)) for process in running]
    finally:
        for process in running:
            process.kill()


def output(folder: Path, process: int) -> list[str]:
    """What a process printed, but for gloo's own chatter."""
    lines = (folder / f"{process}.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("[Gloo]")]


def losses(folder: Path) -> dict[int, float]:
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return {found["step"]: found["loss"] for found in map(json.loads, lines) if "loss" in found}


def wait_for_step(folder: Path, step: int, seconds: float = 200) -> None:
    last = time.monotonic() + seconds
    metrics = folder / "run" / "metrics.jsonl"
    while not (metrics.exists() and step in losses(folder)):
        assert time.monotonic() < last, (folder / "0.txt").read_text()
        time.sleep(0.1)


def test_a_killed_run_ends_in_one_line_and_goes_on_with_other_processes(tmp_path):
    whole = tmp_path / "whole"
    assert finish(
        start(whole, 1, "run.max_steps=40", "parallel.launcher=none", devices=1, environs=[{}])
    ) == [0]
    expected = losses(whole)

    killed = tmp_path / "killed"
    running = start(killed, 2, "run.max_steps=40", "parallel.fsdp=2", "parallel.data=2")
    wait_for_step(killed, 4)
    running[1].kill()
    assert finish(running, 60) == [1, -signal.SIGKILL]
    assert "process 1" in output(killed, 0)[-1] and "ended without a word" in output(killed, 0)[-1]
    assert not any("Traceback" in line for line in output(killed, 0))
    before = losses(killed)
    assert before == pytest.approx({s: expected[s] for s in before}, rel=1e-6)

    again = start(killed, 1, "run.max_steps=40", "parallel.tensor=2", environs=[{}])
    assert finish(again) == [0], output(killed, 0)
    assert losses(killed) == pytest.approx(expected, rel=1e-6)
