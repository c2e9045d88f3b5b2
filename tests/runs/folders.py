"""Folders as runs write them, with numbers that are the same everywhere."""

import json
import math
import os
from pathlib import Path

START = 1_795_000_000.0


def write_run(
    folder: Path, steps: int = 60, total: int = 90, kind: str = "rl", seed: int = 0, **beat
) -> Path:
    """A run of `steps` steps, one a second and a half."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "run": {"output_dir": str(folder), "max_steps": total, "seed": seed},
        "model": {"path": "Qwen/Qwen3-0.6B"},
        "task": {"kind": kind, **({"objective": "grpo"} if kind == "rl" else {})},
        "adapter": {"kind": "none"},
        "optim": {"learning_rate": 0.0002 if seed == 0 else 0.0001},
        "log": {"watchdog_seconds": 300.0},
    }
    (folder / "config.json").write_text(json.dumps(config))
    attempt = {
        "attempt": 1,
        "time": "2026-11-18T14:13:20+0000",
        "command": ["jaxtrain", "--config", "x.toml"],
        "versions": {"python": "3.12.1", "jax": "0.11.2"},
        "devices": ["NVIDIA H200"] * 4,
    }
    write_lines(folder / "attempts.jsonl", [attempt])
    actual = [line for step in range(1, steps + 1) for line in lines(step, kind, seed)]
    write_lines(folder / "metrics.jsonl", actual)
    write_lines(folder / "samples.jsonl", [sample(s, s % 3) for s in range(1, min(steps, 12) + 1)])
    (folder / "log.txt").write_text(
        "21:31:39 run runs/agent, attempt 1: jax 0.11.2\n"
        "21:31:40 step 1/90  0:00:01  loss 0.5  ETA -\n"
        "21:38:10 vllm http://gpu7:8000 dropped (/health: refused); 1 left\n"
        "21:44:02 vllm http://gpu7:8000 is back with version 41\n"
        "21:47:55 warning: 31 % of the groups had equal rewards\n"
    )
    current_time = START + 1.5 * steps
    facts = {
        **{"state": "running", "message": "", "step": steps, "total_steps": total},
        **{"start_step": 0, "attempt": 1, "started": START, "pid": 2**22 + 1, "host": "gpu1"},
        **{"phase": "waiting for answers", "time": current_time, "moved": current_time},
    }
    (folder / "heartbeat.json").write_text(json.dumps(facts | beat))
    os.utime(folder / "heartbeat.json", (current_time, current_time))
    gpu = {"name": "NVIDIA H200", "memory": 60.1 * 2**30, "memory_total": 143 * 2**30}
    gpus = [
        {"index": i, "use": 0.91 + i / 100, **gpu, "temperature": 61 + i, "power": 612.0 + i}
        for i in range(4)
    ]
    host = {"cpu": 0.22, "memory": 38 * 2**30, "memory_total": 128 * 2**30, "disk_free": 2**41}
    (folder / "hardware").mkdir(exist_ok=True)
    (folder / "checkpoints" / "25").mkdir(parents=True, exist_ok=True)
    write_lines(folder / "hardware" / "gpu1.jsonl", [{"time": current_time, "gpus": gpus, **host}])
    up = {"url": "http://gpu7:8000", "state": "up", "version": 59, "in_flight": 12, "why": ""}
    down = {"url": "http://gpu8:8000", "state": "down", "version": 41, "in_flight": 0}
    servers = [
        up | {"since": START},
        down | {"why": "/health: refused", "since": current_time - 90},
    ]
    (folder / "servers.json").write_text(json.dumps(servers))
    return folder


def write_lines(path: Path, values: list[dict], mode: str = "w") -> None:
    """Values as a jsonl file."""
    with path.open(mode) as file:
        file.write("".join(json.dumps(value) + "\n" for value in values))


def lines(step: int, kind: str = "rl", seed: int = 0) -> list[dict]:
    """The lines of one step: its own, and every tenth time an evaluation's."""
    wave = math.sin(step / 4 + seed) / 10
    line = {"step": step, "time": START + 1.5 * step, "loss": 2 / step + 0.1 * (seed + 1)}
    line |= {"grad_norm": 0.5 + wave, "learning_rate": 2e-4 * (1 - step / 100), "tokens": 4096.0}
    line |= {"step_seconds": 1.5, "tokens_per_second_per_device": 7500 + 900 * wave, "mfu": 0.36}
    if kind == "rl":
        line |= {"reward": 0.4 + step / 200 + wave, "entropy": 0.1 + wave / 4, "lag/max": 1}
        line |= {"completions/mean_length": 50 + 40 * wave, "sync/seconds": 0.11}
    actual = [line]
    if step % 10 == 0:
        actual.append({"step": step, "time": START + 1.5 * step + 0.5, "eval/accuracy": step / 100})
    return actual


def sample(step: int, reward: float) -> dict:
    """Answer with a tool call."""
    call = {"function": {"name": "calculator", "arguments": {"expression": f"{step} * 2"}}}
    return {
        "step": step,
        "reward": reward,
        "rewards": {"solved": reward},
        "prompt": [{"role": "user", "content": f"What is {step} * 2?"}],
        "completion": [
            {"role": "assistant", "content": "I need it.", "tool_calls": [call]},
            {"role": "tool", "name": "calculator", "content": "\n".join("abcdef")},
            {"role": "assistant", "content": f"The answer is {step * 2}."},
        ],
        "finish_reason": "stop",
        "tokens": 40 + step,
        "policy_version": step - 1,
    }


HOSTILE = {
    "step": 61,
    "reward": 0.5,
    "rewards": {"[red]": 1, "x": None},
    "prompt": "a [/nope] [bold]markup[/bold] <script>alert(1)</script></script>",
    "completion": "\x1b[2J\x1b]0;title\x07 日本語の答え🙂 \u202eabc " + "x" * 1_000_000,
    "finish_reason": ["not", "a", "text"],
    "tokens": "many",
}
"""A sample that nobody should have written."""
