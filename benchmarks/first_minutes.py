"""The first minutes with a real model: whole commands, with an empty compile cache and again.

python benchmarks/first_minutes.py MODEL DATA --out benchmarks/results/first_minutes_h100
python benchmarks/first_minutes.py MODEL DATA --works sft --small   # on a CPU, to see that it works

MODEL is a chat model's folder, SmolLM2-135M-Instruct in docs/figures.md; DATA holds
gsm8k_train.jsonl and gsm8k_test.jsonl (question, answer). Each command is a process of its own.

sft       30 steps of 8 x 2048 tokens
sft_eval  201 steps, and 1,319 greedy answers of at most 256 tokens before and after
grpo      14 rounds of 32 x 16 answers of at most 256 tokens by the local sampler
generate  1,319 prompts answered greedily, at most 256 tokens
prompts6k 6,000 prompts likewise

wall s    the whole command; step s: from its start to the end of the first training step
programs  compiled, of them read from the cache on disk; seconds of all threads behind them
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import Table, command_line, log, make_parser, query_gpu, read_lines, shorten

COLUMNS = (
    ("work", "work", "<10"),
    ("cache", "cache", "<6"),
    ("wall s", "wall_s", ">8.1f"),
    ("step s", "first_step_s", ">8.1f"),
    ("programs", "programs", ">9d"),
    ("cached", "cached", ">7d"),
    ("trace s", "tracing", ">8.1f"),
    ("lower s", "lowering", ">8.1f"),
    ("XLA s", "XLA", ">7.1f"),
)
PROGRAMS = re.compile(
    r"programs: (\d+), (\d+) of them.*; tracing ([\d.]+) s, lowering ([\d.]+) s, XLA ([\d.]+) s"
)
REAL = Path(__file__).parents[1] / "configs" / "real"


def list_words(work: str, model: Path, data: Path, folder: Path, small: bool) -> list[str]:
    """Return the words of a command; its results lie in `folder`."""
    if work in ("generate", "prompts6k"):
        count = 3 if small else 6000 if work == "prompts6k" else 1319
        rows = read_lines(data / f"gsm8k_{'train' if work == 'prompts6k' else 'test'}.jsonl")
        prompts = folder / "prompts.jsonl"
        prompts.write_text(
            "".join(json.dumps({"prompt": r["question"]}) + "\n" for r in rows[:count])
        )
        words = ["generate", str(model), "--input", str(prompts)]
        words += ["--output", str(folder / "answers.jsonl"), "sampling.temperature=0"]
        return [*words, f"sampling.max_new_tokens={8 if small else 256}"]
    kind = "grpo" if work == "grpo" else "sft"
    steps = {"sft": 30, "sft_eval": 201, "grpo": 14}[work]
    overrides = {
        "run.output_dir": folder / "run",
        "run.max_steps": 2 if small else steps,
        "run.export": "false",
        "model.path": model,
        "data.datasets.0.path": data / "gsm8k_train.jsonl",
        "data.datasets.0.name": "null",
        "checkpoint.every": 10_000,
    }
    if kind == "sft":
        overrides |= {"run.num_epochs": "null", "data.eval_datasets": "[]"}
    else:
        overrides |= {"data.micro_batch_size": 8}
    if work == "sft_eval":
        overrides |= {"eval.sets.0.path": data / "gsm8k_test.jsonl", "eval.sets.0.subset": "null"}
        overrides |= {"eval.every": 10_000}
    else:
        overrides |= {"eval.sets": "[]", "eval.at_start": "false", "eval.every": "never"}
        overrides |= {"rewards": "[]", "sampling": "{}"} if kind == "sft" else {}
    if small:
        overrides |= {"data.sequence_len": 256, "data.micro_batch_size": 1}
        if kind == "grpo":
            overrides |= {"rollout.prompts_per_step": 2, "rollout.group_size": 2}
            # Short answers all earn nothing.
            overrides |= {"sampling.max_new_tokens": 8, "rollout.zero_advantage": "keep"}
        if work == "sft_eval":
            overrides |= {"eval.sets.0.max_rows": 3, "eval.sets.0.max_new_tokens": 8}
    words = ["--config", str(REAL / f"{kind}_smollm2.toml")]
    return words + [f"{key}={value}" for key, value in overrides.items()]


def measure(words: list[str], folder: Path, cache: Path, seconds: float) -> dict:
    """Run a command and return the cells of its row."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "HF_HUB_OFFLINE": "1"}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    command = [sys.executable, "-m", "jaxtrain.main", *words]
    start, started = time.perf_counter(), time.time()
    try:
        run = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, env=environment
        )
        output, failed = run.stdout + run.stderr, run.returncode and f"exit {run.returncode}"
    except subprocess.TimeoutExpired as error:
        output, failed = (error.stdout or b"").decode(errors="replace"), f"over {seconds:.0f} s"
    row: dict = {"wall_s": time.perf_counter() - start}
    if failed:
        row["failed"] = f"{failed}: {shorten(output[-600:], 600)}"
    if match := PROGRAMS.search(output):
        row |= dict(zip(("programs", "cached"), map(int, match.groups()[:2]), strict=True))
        names = ("tracing", "lowering", "XLA")
        row |= dict(zip(names, map(float, match.groups()[2:]), strict=True))
    steps = [line for line in read_lines(folder / "run" / "metrics.jsonl") if "loss" in line]
    if steps:
        row["first_step_s"] = steps[0]["time"] - started
    phases = re.search(r"^seconds: (.*)$", output, re.MULTILINE)
    row["how"] = phases.group(1) if phases else ""
    return row


def main() -> None:
    """Measure the chosen commands, each with an empty cache and, unless --cold, again."""
    parser = make_parser(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    works = ("sft", "grpo", "generate", "sft_eval", "prompts6k")
    parser.add_argument("--works", nargs="+", choices=works, default=list(works))
    parser.add_argument("--cold", nargs="*", choices=works, default=[], help="not run again")
    parser.add_argument("--seconds", type=float, default=300, help="limit of each command")
    parser.add_argument("--small", action="store_true", help="a few rows and steps")
    options = parser.parse_args()
    hardware = f"{query_gpu('name').strip()}, {os.cpu_count()} CPU cores"
    table = Table(COLUMNS, options.out, command_line(), hardware=hardware)
    for work in options.works:
        with tempfile.TemporaryDirectory() as cache:
            for state in ("cold",) if work in options.cold else ("cold", "warm"):
                log(f"{work}, {state}")
                with tempfile.TemporaryDirectory() as name:
                    folder = Path(name)
                    words = list_words(
                        work, options.model.resolve(), options.data.resolve(), folder, options.small
                    )
                    row = measure(words, folder, Path(cache), options.seconds)
                table.add({"work": work, "cache": state, **row})


if __name__ == "__main__":
    main()
