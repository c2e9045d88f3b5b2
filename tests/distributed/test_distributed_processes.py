"""Real processes on this machine, through the command line: one loss, one line when one ends.

They talk over gloo, as GPUs would over NCCL; each has two fake devices.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from other_devices import set_cpus
from safetensors.numpy import load_file

from jaxtrain.distributed.hub import free_port
from jaxtrain.main import main

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

GLOO = re.compile(r"\[Gloo\]|peer ranks|^[\d\s:]*$")


def start(
    folder: Path,
    count: int,
    *overrides: str,
    devices: int = 2,
    environs=None,
    config_text=CONFIG,
    verb=("--config", "config.toml"),
):
    """`count` processes of one run in folder/run; their output goes to folder/<i>.txt."""
    folder.mkdir(exist_ok=True)
    config = folder / "config.toml"
    config.write_text(config_text)
    port, running = free_port(), []
    for process in range(count):
        environ = {
            **os.environ,
            "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}:{ROOT / 'tests/plain'}",
            **set_cpus(devices),
            "PYTHONUNBUFFERED": "1",
            **(environs[process] if environs else {}),
        }
        words = [f"run.output_dir={folder / 'run'}", *overrides]
        if environs is None:
            words += [f"parallel.coordinator=localhost:{port}", f"parallel.num_processes={count}"]
            words += [f"parallel.process_id={process}"]
        command = [sys.executable, "-m", "jaxtrain.main", *verb, *words]
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
    """Output of a process, but for gloo's own chatter: several threads write over each other."""
    lines = (folder / f"{process}.txt").read_text().splitlines()
    return [line for line in lines if not GLOO.search(line)]


def losses(folder: Path) -> dict[int, float]:
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return {row["step"]: row["loss"] for row in map(json.loads, lines) if "loss" in row}


def wait_for_step(folder: Path, step: int, seconds: float = 200) -> None:
    last = time.monotonic() + seconds
    metrics = folder / "run" / "metrics.jsonl"
    while not (metrics.exists() and step in losses(folder)):
        assert time.monotonic() < last, (folder / "0.txt").read_text()
        time.sleep(0.1)


def run_alone(folder: Path, *overrides: str) -> dict[int, float]:
    """Losses of the same run in this process."""
    folder.mkdir()
    (folder / "config.toml").write_text(CONFIG)
    words = ["--config", str(folder / "config.toml"), f"run.output_dir={folder / 'run'}"]
    assert main([*words, *overrides]) == 0
    return losses(folder)


@pytest.mark.thorough
def test_a_killed_run_ends_in_one_line_and_goes_on_with_other_processes(tmp_path):
    expected = run_alone(tmp_path / "whole", "run.max_steps=40")
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


@pytest.mark.thorough
def test_a_run_goes_from_8_devices_to_2(tmp_path):
    """LoRA, whose frozen base every start draws anew, and embeddings trained in full; exports are
    equal, too. (Full training goes on with other processes and meshes above.)"""
    common = ["optim.lr_scheduler=constant", "run.export=true"]
    common += ["adapter=lora", "adapter.train_embeddings=true"]
    reference, moved = tmp_path / "whole", tmp_path / "moved"
    expected_losses = run_alone(reference, "run.max_steps=4", *common)
    for steps, devices, mesh in [
        (2, 8, ["parallel.fsdp=4", "parallel.tensor=2"]),
        (4, 2, ["parallel.fsdp=1", "parallel.context=2"]),
    ]:
        words = [f"run.max_steps={steps}", *mesh, *common]
        running = start(moved, 1, *words, devices=devices, environs=[{}])
        assert finish(running) == [0], output(moved, 0)
    assert losses(moved) == pytest.approx(expected_losses, rel=2e-6)
    files = [
        next((folder / "run" / "model").glob("*.safetensors")) for folder in (reference, moved)
    ]
    expected, tensors = (load_file(file) for file in files)
    assert expected.keys() == tensors.keys()
    for tensor, value in expected.items():
        # AdamW's first steps divide by the gradient's own size: rounding of a gradient near 0
        # shows as a share of the learning rate, 3e-3.
        np.testing.assert_allclose(tensors[tensor], value, atol=3e-4)


TREES = (
    "task.kind=tree",
    "task.units_per_step=3",
    "data.global_batch_size=null",
    "optim.beta2=0.9",
)
DRAFT = (
    *("task.kind=dflash", "task.block_size=4", "task.num_anchors=8", "task.min_loss_tokens=4"),
    *("task.draft.num_layers=1", "task.draft.target_layers=[0, 1]", "run.max_steps=3"),
)


@pytest.mark.slow
def test_a_step_has_its_exact_trees_on_any_number_of_processes(tmp_path):
    rows = {}
    for name, words in {"whole": (), "two": ("parallel.fsdp=2", "parallel.data=2")}.items():
        if name == "whole":
            run_alone(tmp_path / name, *TREES)
        else:
            running = start(tmp_path / name, 2, *TREES, *words)
            assert finish(running) == [0, 0], output(tmp_path / name, 0)
        lines = (tmp_path / name / "run" / "metrics.jsonl").read_text().splitlines()
        rows[name] = [row for row in map(json.loads, lines) if "loss" in row]
    for whole, two in zip(rows["whole"], rows["two"], strict=True):
        for key in ("loss", "loss/sum", "loss/token_count", "trained_tokens"):
            assert two[key] == pytest.approx(whole[key], rel=2e-6), key
        assert whole["loss/sum"] == pytest.approx(whole["loss"] * whole["loss/token_count"])
        # A tree's weights are shares of branches: fractions of the tokens that train.
        assert 0 < whole["loss/token_count"] <= whole["trained_tokens"]


@pytest.mark.slow
def test_a_server_gives_each_process_the_states_of_its_rows(tmp_path):
    expected = run_alone(tmp_path / "step", *DRAFT)
    port, words = free_port(), (*DRAFT, 'task.target.source="server"')
    verb = ("capture", "--port", str(port), "--config", "config.toml")
    [server] = start(tmp_path / "server", 1, *words, environs=[{}], verb=verb)
    try:
        last = time.monotonic() + 100
        while not any("serving states" in line for line in output(tmp_path / "server", 0)):
            assert time.monotonic() < last, output(tmp_path / "server", 0)
            time.sleep(0.1)
        words = (*words, f'task.target.servers=["http://127.0.0.1:{port}"]')
        running = start(tmp_path / "two", 2, *words, "parallel.fsdp=2", "parallel.data=2")
        assert finish(running) == [0, 0], output(tmp_path / "two", 0)
    finally:
        server.kill()
        server.wait()
    assert losses(tmp_path / "two") == pytest.approx(expected, rel=2e-6)


@pytest.mark.slow
def test_processes_stop_together_and_report_a_loss_once(tmp_path):
    """A stop request to a single process is tested in test_distributed_rl.py."""
    words = ["run.max_steps=100000", "parallel.fsdp=2", "parallel.context=2"]
    running = start(tmp_path / "killed", 4, *words, devices=1)
    wait_for_step(tmp_path / "killed", 3)
    running[0].kill()
    assert sorted(finish(running, 100)) == [-signal.SIGKILL, 1, 1, 1]
    lines = [
        line for i in range(4) for line in output(tmp_path / "killed", i) if "stopped:" in line
    ]
    assert len(lines) == 1 and "process 0 on" in lines[0]


@pytest.mark.parametrize(
    "last",
    [pytest.param(True, marks=pytest.mark.slow), pytest.param(False, marks=pytest.mark.thorough)],
)
def test_a_signal_to_a_single_process_while_all_evaluate(last, tmp_path):
    """Either all processes write the model, or none does."""
    rows = '{path="builtin:calculator", options={num_rows=300}}'
    words = [f"data.eval_datasets=[{rows}]", "eval.max_batches=100000", "eval.every=2"]
    words += [f"run.max_steps={2 if last else 100000}", "run.export=true"]
    running = start(tmp_path / "run", 2, *words, "parallel.fsdp=2", "parallel.data=2")
    wait_for_step(tmp_path / "run", 2)
    running[1].send_signal(signal.SIGTERM)
    assert finish(running, 60) == [0, 0], output(tmp_path / "run", 0)
    stopped = any("SIGTERM: saved step" in line for line in output(tmp_path / "run", 0))
    assert stopped != (tmp_path / "run" / "run" / "model").exists() and (stopped or last)


@pytest.mark.thorough
def test_config_errors_are_printed_once(tmp_path):
    running = start(tmp_path / "all", 2, "data.sequence_len=100000")
    assert finish(running, 100) == [2, 2]
    lines = [line for i in range(2) for line in output(tmp_path / "all", i)]
    assert sum("data.sequence_len" in line for line in lines) == 1
    assert not any("Traceback" in line for line in lines)

    running = start(tmp_path / "missing", 2, "parallel.start_timeout=8")
    running[1].kill()
    assert finish(running, 100) == [1, -signal.SIGKILL]
    assert "process 1" in output(tmp_path / "missing", 0)[-1]
