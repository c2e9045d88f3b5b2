"""Real runs, really killed: what comes out equals the uninterrupted run, bit for bit (CPU)."""

import contextlib
import functools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from jaxtrain.main import main
from jaxtrain.runs.checkpoint import load_checkpoint
from jaxtrain.runs.checkpoint_folder import find_good_step, find_steps
from jaxtrain.runs.manifest import read_manifest

REPO = Path(__file__).parents[2]
STEPS, EVERY = 24, 4
CONFIG = f"""
model = "tiny"
[run]
max_steps = {STEPS}
export = false
[data]
sequence_len = 256
micro_batch_size = 2
packing_window = 16
[[data.datasets]]
path = "builtin:calculator"
options = {{ num_rows = 300, seed = 0 }}
[[data.eval_datasets]]
path = "builtin:calculator"
split = "test"
options = {{ num_rows = 8, seed = 0 }}
[optim]
learning_rate = 1e-3
moments = "int8"
gradient_accumulation_steps = 2
[eval]
every = 10
[checkpoint]
every = {EVERY}
keep = 3
[log]
console = "plain"
plot = false
"""
SMALL = (
    "model.architecture.hidden_size=32",
    "model.architecture.num_hidden_layers=2",
    "model.architecture.intermediate_size=64",
    "model.architecture.head_dim=8",
)
MEASURED = {"time", "step_seconds", "tokens_per_second_per_device", "mfu", "peak_memory_gib"}
MEASURED |= {"data_seconds"}
"""Read from clocks and allocators: these alone may differ between two runs."""


def start(folder: Path, *overrides: str, devices: int = 1) -> subprocess.Popen:
    """Train into `folder` with the command line that people use."""
    config = folder.with_name("run.toml")
    config.parent.mkdir(exist_ok=True)
    config.write_text(CONFIG)
    command = [sys.executable, "-m", "jaxtrain.main", "--config", str(config), *SMALL]
    env = {
        **os.environ,
        "PYTHONPATH": f"{REPO}:{REPO / 'kernels'}:{REPO / 'tests/plain'}",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "false",  # as people compile
    }
    return subprocess.Popen(
        [*command, f"run.output_dir={folder}", *overrides],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=env,
        cwd=folder.parent,
    )


def run(folder: Path, *overrides: str, code: int = 0, devices: int = 1) -> str:
    """Train to the end; returns everything that was printed."""
    child = start(folder, *overrides, devices=devices)
    output, _ = child.communicate(timeout=300)
    assert child.returncode == code, output
    return output


def kill_when(child: subprocess.Popen, condition, delay: float = 0.0) -> bool:
    """SIGKILL once the condition holds; False when the run had ended before."""
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        if child.poll() is not None:
            return False
        time.sleep(0.002)
    time.sleep(delay)
    child.kill()
    child.communicate()
    return True


def read_metrics(folder: Path) -> list[dict]:
    try:
        lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def last_step(folder: Path) -> int:
    return max((line["step"] for line in read_metrics(folder)), default=0)


def drop_measured(lines: list[dict]) -> list[dict]:
    return [{k: v for k, v in line.items() if k not in MEASURED} for line in lines]


def read_arrays(folder: Path) -> dict[str, np.ndarray]:
    """Read every array of the newest checkpoint, by name."""
    step, problems = find_good_step(folder / "checkpoints")
    assert step == STEPS and not problems
    place = SingleDeviceSharding(jax.devices()[0])
    saved = read_manifest(folder / "checkpoints" / str(step))["arrays"]
    abstract = {
        name: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=place)
        for name, (shape, dtype) in saved.items()
    }
    return {
        k: np.asarray(v) for k, v in load_checkpoint(folder / "checkpoints", abstract)[1].items()
    }


def assert_same_run(folder: Path, expected: Path) -> None:
    """Every logged number and every bit of the final state."""
    assert drop_measured(read_metrics(folder)) == drop_measured(read_metrics(expected))
    ours, theirs = read_arrays(folder), read_arrays(expected)
    assert ours.keys() == theirs.keys() and len(ours) > 10
    for name, value in ours.items():
        assert value.tobytes() == theirs[name].tobytes(), name


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The uninterrupted run that all others are compared with."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    run(folder)
    return folder


@pytest.mark.slow
def test_the_uninterrupted_run_is_what_the_others_rely_on(whole):
    losses = [line["loss"] for line in read_metrics(whole) if "loss" in line]
    assert len(losses) == STEPS and len(set(losses)) == STEPS
    assert np.mean(losses[-5:]) < np.mean(losses[:5])
    assert find_steps(whole / "checkpoints") == [16, 20, 24]
    assert "eval/loss" in read_metrics(whole)[10]


@pytest.mark.thorough
def test_a_run_that_is_killed_again_and_again_repeats_the_whole_one(whole, tmp_path):
    """By SIGKILL: while it starts, in every part of writing a checkpoint, at random moments."""
    folder, moments = tmp_path / "run", random.Random(0)

    def starting():
        return time.time() - began > 2.0

    def writing(sign):
        """A file of a checkpoint that this process, not one before, has begun."""
        with contextlib.suppress(FileNotFoundError):
            found = (folder / "checkpoints").glob(sign)
            return any(path.stat().st_mtime > began for path in found)

    def running():
        return last_step(folder) >= target

    signs = ["*.writing", "*.orbax-checkpoint-tmp/*", "*/_CHECKPOINT_METADATA"]
    written = [functools.partial(writing, sign) for sign in signs]
    for until in [starting, running, *written, running]:
        began, target = time.time(), last_step(folder) + moments.randint(2, 5)
        assert kill_when(start(folder), until, moments.random() * 0.05), "had ended before"
    assert re.search(r"attempt [67]:", run(folder))  # who is killed at 2 s may not have begun one
    assert_same_run(folder, whole)


@pytest.mark.slow
def test_sigterm_saves_and_the_second_run_goes_on(whole, tmp_path):
    folder = tmp_path / "run"
    child = start(folder)
    while last_step(folder) < 5:
        assert child.poll() is None, child.communicate()
        time.sleep(0.005)
    child.send_signal(signal.SIGTERM)
    output, _ = child.communicate(timeout=120)
    assert child.returncode == 0, output
    assert "SIGTERM: stopping after this step" in output
    stopped = last_step(folder)
    assert f"SIGTERM: saved step {stopped} of {STEPS}" in output and 5 <= stopped < STEPS
    assert find_good_step(folder / "checkpoints") == (stopped, [])
    assert f"steps {stopped + 1} to {STEPS}" in run(folder)
    assert_same_run(folder, whole)


@pytest.mark.slow
def test_a_corrupted_last_checkpoint_is_named_and_the_one_before_used(whole, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    victim = max((folder / f"checkpoints/{STEPS}").rglob("d/*"), key=lambda p: p.stat().st_size)
    with victim.open("r+b") as file:
        file.truncate(victim.stat().st_size - 1)
    output = run(folder)
    assert f"checkpoint {STEPS} is damaged" in output and victim.name in output
    assert "going on from step 20" in output
    assert_same_run(folder, whole)


@pytest.mark.thorough
def test_the_second_signal_ends_a_compiling_run_at_once(tmp_path):
    child = start(tmp_path / "run", "data.sequence_len=512", "model.scan_layers=false")
    for line in child.stdout:
        if "parameters on" in line:
            break
    child.send_signal(signal.SIGTERM)
    child.send_signal(signal.SIGINT)
    child.send_signal(signal.SIGTERM)
    child.communicate(timeout=20)
    assert child.returncode in (128 + signal.SIGTERM, 128 + signal.SIGINT)


@pytest.mark.slow
def test_another_config_and_resume_modes_are_refused(whole, tmp_path, capsys):
    for folder, change, message in [
        (whole, "optim.learning_rate=0.5", "optim.learning_rate: 0.001 -> 0.5"),
        (whole, "run.resume=never", 'run.resume is "never"'),
        (tmp_path / "new", "run.resume=required", "no usable checkpoint"),
    ]:
        config = ["--config", str(whole.with_name("run.toml")), *SMALL]
        assert main([*config, f"run.output_dir={folder}", change]) == 2
        assert message in capsys.readouterr().err
    assert "all 24 steps are done" in run(whole, "run.resume=required", "log.every=5")


@pytest.mark.thorough
def test_sigterm_before_the_first_step_is_honest(tmp_path):
    child = start(tmp_path / "run")
    for line in child.stdout:
        if "builtin:calculator: 300 rows" in line:
            break
    child.send_signal(signal.SIGTERM)
    output, _ = child.communicate(timeout=120)
    assert child.returncode == 0, output
    step = last_step(tmp_path / "run")
    expected = f"saved step {step} of" if step else "nothing new to save after step 0 of"
    assert expected in output


@pytest.mark.thorough
def test_a_longer_run_goes_on_from_the_end(whole, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    output = run(folder, f"run.max_steps={STEPS + 2}")
    assert f"run.max_steps: {STEPS} -> {STEPS + 2}" in output
    steps = [line["step"] for line in read_metrics(folder) if "loss" in line]
    assert steps == list(range(1, STEPS + 3))


@pytest.mark.slow
def test_a_loss_that_is_not_finite_stops_before_anything_is_saved(tmp_path, capsys):
    folder, config = tmp_path / "run", tmp_path / "run.toml"
    config.write_text(CONFIG)
    options = ["optim.name=sgd", "optim.learning_rate=1e3", "optim.max_grad_norm=null"]
    options += ["optim.lr_scheduler=constant", "checkpoint.every=1", f"run.output_dir={folder}"]
    assert main(["--config", str(config), *SMALL, *options]) == 1
    output = capsys.readouterr().err
    assert "is not finite" in output
    [batch] = folder.glob("nonfinite_batch_step_*.npz")
    bad = int(batch.stem.split("_")[-1])
    assert f"step {bad}: " in output
    assert max(find_steps(folder / "checkpoints"), default=0) < bad
    assert all(np.isfinite(value) for line in read_metrics(folder) for value in line.values())


@pytest.mark.slow
def test_a_disk_that_fills_up_is_one_message_and_the_run_goes_on_later(whole, tmp_path):
    size = sum(p.stat().st_size for p in (whole / "checkpoints").rglob("*") if p.is_file())
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={int(size * 0.9)}", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        folder = disk / "run"
        output = run(folder, code=2)
        assert "No space left on device" in output and "Traceback" not in output
        step, problems = find_good_step(folder / "checkpoints")
        assert step > 0 and not problems
        subprocess.run(["mount", "-o", "remount,size=100m", str(disk)], check=True)
        run(folder)
        assert_same_run(folder, whole)
    finally:
        subprocess.run(["umount", str(disk)], check=True)
