"""Kill runs at random moments, start them again, and compare with runs that were never killed.

`python benchmarks/kills.py --kills 50`, on CPU. Supervised fine-tuning and reinforcement learning
in mode sync must repeat every logged number and every bit of the final state. In mode async, where
the order of finishing is not reproducible, every step must be there once and no prompt trained
twice. A moment is a random time after the start or after a random step, so that kills also meet
imports, compilation, checkpoints being written and rounds being drawn.
"""

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import jax
import numpy as np
from harness import Report, read_lines

from jaxtrain.runs.checkpoint import load_checkpoint
from jaxtrain.runs.checkpoint_folder import find_good_step
from jaxtrain.runs.manifest import read_manifest

REPO = Path(__file__).parents[1]
STEPS = 16
COMMON = f"""
[run]
max_steps = {STEPS}
export = false
[model]
tokenizer = "builtin"
compute_dtype = "float32"
[model.architecture]
architectures = ["Qwen3ForCausalLM"]
model_type = "qwen3"
vocab_size = 512
hidden_size = 32
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
head_dim = 8
intermediate_size = 64
[checkpoint]
every = 3
keep = 3
[log]
console = "plain"
plot = false
[[data.datasets]]
path = "builtin:calculator"
options = {{ num_rows = 400, seed = 0 }}
"""
SFT = """
[data]
sequence_len = 256
micro_batch_size = 2
"""
RL = """
[data]
sequence_len = 128
[task]
kind = "rl"
[env]
kind = "calculator"
[rollout]
prompts_per_step = 4
group_size = 4
zero_advantage = "keep"
samples = "all"
MODE
[sampling]
temperature = 1.0
max_new_tokens = 16
"""
RUNS = {
    "sft": SFT,
    "rl sync": RL.replace("MODE", 'mode = "sync"'),
    "rl async": RL.replace("MODE", 'mode = "async"\nmax_lag = 2'),
}
PATIENCE = 3600
"""Seconds that a run may take on a machine that is busy."""
CLOCKS = ("seconds", "per_second", "time", "memory", "mfu")


def start(folder: Path, text: str) -> subprocess.Popen:
    """Start the run in `folder` by the command line."""
    config = folder.with_suffix(".toml")
    config.write_text(text)
    env = os.environ | {
        "PYTHONPATH": f"{REPO}:{REPO / 'kernels'}",
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(folder.parent / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    command = [sys.executable, "-m", "jaxtrain.main", "--config", config.name]
    with folder.with_suffix(".log").open("a") as log:
        return subprocess.Popen(
            [*command, f"run.output_dir={folder.name}"],
            stdout=log,
            stderr=log,
            env=env,
            cwd=folder.parent,
        )


def last_step(folder: Path) -> int:
    return max((line["step"] for line in read_lines(folder / "metrics.jsonl")), default=0)


def run_with_kills(folder: Path, text: str, moments: random.Random, kills: int) -> int:
    """Kill the run up to `kills` times, each time starting it again; return how many were due."""
    for number in range(kills):
        child = start(folder, text)
        early = moments.random() < 0.25
        target = last_step(folder) + moments.randint(1, 4)
        until = time.monotonic() + moments.uniform(0.2, 8.0)
        while child.poll() is None:
            if time.monotonic() >= until if early else last_step(folder) >= target:
                break
            time.sleep(0.005)
        time.sleep(moments.random() * 0.3)
        if child.poll() is not None:
            assert child.returncode == 0, folder.with_suffix(".log").read_text()[-3000:]
            return number
        child.kill()
        child.wait()
    child = start(folder, text)
    assert child.wait(PATIENCE) == 0, folder.with_suffix(".log").read_text()[-3000:]
    return kills


def read_state(folder: Path) -> dict[str, bytes]:
    """Every array of the last checkpoint."""
    step, problems = find_good_step(folder / "checkpoints")
    assert step == STEPS and not problems, (step, problems)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    saved = read_manifest(folder / "checkpoints" / str(step))["arrays"]
    shapes = {
        name: jax.ShapeDtypeStruct(shape, np.dtype(dtype), sharding=device)
        for name, (shape, dtype) in saved.items()
    }
    arrays = load_checkpoint(folder / "checkpoints", shapes)[1]
    return {name: np.asarray(value).tobytes() for name, value in arrays.items()}


def read_numbers(folder: Path) -> list[dict]:
    """metrics.jsonl without what clocks and allocators say."""
    return [
        {key: value for key, value in line.items() if not any(word in key for word in CLOCKS)}
        for line in read_lines(folder / "metrics.jsonl")
    ]


def find_differences(actual: list[dict], expected: list[dict]) -> str:
    """Return the first keys that differ, with line numbers; "none" where all lines are equal."""
    if len(actual) != len(expected):
        return f"{len(actual)} lines for {len(expected)}"
    keys = [
        f"{key}@{number}"
        for number, (line, reference) in enumerate(zip(actual, expected, strict=True))
        for key in sorted(line.keys() | reference.keys())
        if line.get(key) != reference.get(key)
    ]
    return " ".join(keys[:5]) or "none"


def compare(name: str, folder: Path, full: Path) -> dict[str, int | str]:
    """Return counts of lost, doubled and differing entries."""
    steps = Counter(line["step"] for line in read_lines(folder / "metrics.jsonl") if "loss" in line)
    counts: dict[str, int | str] = {
        "steps_lost": sum(step not in steps for step in range(1, STEPS + 1)),
        "steps_doubled": sum(count > 1 for count in steps.values()),
    }
    if name.startswith("rl"):
        samples = read_lines(folder / "samples.jsonl")
        assert samples, "no samples were written"
        trained = {(line["step"], line["prompt_number"]) for line in samples}
        prompts = Counter(number for _, number in trained)
        counts["prompts"] = len(prompts)
        counts["prompts_doubled"] = sum(count > 1 for count in prompts.values())
    if name != "rl async":
        counts["numbers_differ"] = find_differences(read_numbers(folder), read_numbers(full))
        state, expected = read_state(folder), read_state(full)
        counts["arrays_differ"] = sum(state.get(key) != expected[key] for key in expected)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--kills", type=int, default=50, help="in all, shared by the runs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    report, moments = Report(arguments.out), random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as text:
        remaining, number = arguments.kills, 0
        for name, config in RUNS.items():
            full = Path(text) / f"{name.replace(' ', '_')}_whole"
            code = start(full, COMMON + config).wait(PATIENCE)
            assert code == 0, full.with_suffix(".log").read_text()
        while remaining > 0:
            name = list(RUNS)[number % len(RUNS)]
            folder = Path(text) / f"run{number}"
            full = Path(text) / f"{name.replace(' ', '_')}_whole"
            kills = run_with_kills(folder, COMMON + RUNS[name], moments, min(remaining, 8))
            report.add(run=name, kills=kills, **compare(name, folder, full))
            remaining, number = remaining - kills, number + 1
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
