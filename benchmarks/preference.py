"""Preference optimization and reward models on one GPU: this project and TRL, on the same pairs.

python benchmarks/preference.py --out benchmarks/results/preference_h200
python benchmarks/preference.py --size tiny --budget 900        # on a CPU, to see that it works

Random weights and 2,000 pairs of random tokens, whose lengths follow those of a real set of chats.
Parts, each in a process of its own under a time limit, in this order until --budget is used up:

dpo            Qwen3-0.6B shape, all weights, a live frozen reference
dpo-lora-8b    Qwen3-8B shape, LoRA of rank 16, the reference is the model without it
reward         Qwen3-0.6B shape with a score head, Bradley-Terry

Ours is the ordinary command: a pair is a tree, trees are packed into rows, the reference's
log-probs are made before each step. TRL (peers/preference.py) runs its own trainer in several
settings: pairs of like length together, so that little is padding, and Liger's kernels. (Its
padding-free mode is switched off in the version measured here.) Both: float32 masters and bf16
products, unless the row says otherwise; steps of about 30 pairs (LoRA: ours 15); AdamW; clipping.

pairs/s    tokens a second / mean tokens of a pair, over the timed steps: which pairs came first
           does not matter. Wall-clock with data loading and reference; without compilation
tok/s      real tokens: ours counts a prompt once, TRL's twice
peak GiB   the allocator's peak
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

import numpy as np
from harness import Table, command_line, make_parser, query_gpu, read_lines, run_limited, shorten
from step_work import MODELS, write_tokenizer

HERE = Path(__file__).parent
WARM_UP = 4
QUANTILES = [0, 1, 5, 10, 25, 50, 75, 90, 95, 99, 100]
PROMPT = [14, 16, 22, 33, 65, 176, 689, 1082, 1274, 1716, 3314]
CHOSEN = [3, 4, 15, 33, 116, 304, 428, 526, 613, 885, 1026]
REJECTED = [3, 6, 32, 62, 154, 328, 457, 583, 646, 886, 1026]
"""Tokens at these percentiles in 299 pairs of chats in English (Qwen2's tokenizer)."""
CORRELATION = [[1.0, 0.14, 0.23], [0.14, 1.0, 0.45], [0.23, 0.45, 1.0]]
"""Of their logarithms."""
PROMPT_SHARE = 0.6
"""Of the tokens of both sequences of a pair; 0.57 in the set itself."""
LONGEST = 2048
"""Tokens of a prompt with an answer; longer prompts are cut."""

PARTS = {
    "dpo": {"model": "qwen3-0.6b", "kind": "dpo", "rank": 0, "limit": (75, 180), "steps": 24},
    "dpo-lora-8b": {
        "model": "qwen3-8b",
        "kind": "dpo",
        "rank": 16,
        "limit": (110, 120),
        "steps": 8,
    },
    "reward": {"model": "qwen3-0.6b", "kind": "reward", "rank": 0, "limit": (60, 150), "steps": 20},
}
"""limit: seconds for us and for TRL. steps: our timed ones."""
ORDER = (
    ("dpo", "jaxtrain"),
    ("dpo", "TRL"),
    ("dpo-lora-8b", "jaxtrain"),
    ("reward", "jaxtrain"),
    ("reward", "TRL"),
    ("dpo-lora-8b", "TRL"),
)


def draw_lengths(count: int, divisor: int = 1, seed: int = 0) -> np.ndarray:
    """int [count, 3]: tokens of prompt, chosen, rejected. divisor: for tests, shorter ones."""
    rng = np.random.default_rng(seed)
    normal = rng.multivariate_normal(np.zeros(3), CORRELATION, count)
    share = (normal.argsort(0).argsort(0) + 0.5) / count * 100
    columns = (PROMPT, CHOSEN, REJECTED)
    array = np.stack([np.interp(share[:, i], QUANTILES, columns[i]) for i in range(3)], 1)
    answers = array[:, 1:].sum()
    array[:, 0] *= PROMPT_SHARE / (1 - PROMPT_SHARE) * answers / (2 * array[:, 0].sum())
    array[:, 0] = np.minimum(array[:, 0], LONGEST - 1 - array[:, 1:].max(1))
    return np.maximum(array / divisor, 2).astype(int)


def write_pairs(path: Path, lengths: np.ndarray, vocabulary: int) -> None:
    """Pairs of random tokens as text, a word a token."""
    rng = np.random.default_rng(1)
    with path.open("w") as file:
        for row in lengths:
            texts = [" ".join(f"w{token}" for token in rng.integers(2, vocabulary, n)) for n in row]
            names = ("prompt", "chosen", "rejected")
            pair = dict(zip(names, texts, strict=True))
            pair["prompt"] += " "
            file.write(json.dumps(pair) + "\n")


def write_config(part: dict, args: argparse.Namespace, folder: Path, name: str) -> Path:
    """The run of one part, as JSON."""
    tiny = args.size == "tiny"
    micro = 1 if tiny else 2 if part["rank"] else 4
    table = {
        "run": {"max_steps": 1000, "export": False, "output_dir": str(folder / name)},
        "model": {
            "tokenizer": str(folder / "tokenizer"),
            "architecture": MODELS[part["model"]],
            "param_dtype": "bfloat16" if part["rank"] else "float32",
            "compute_dtype": "float32" if tiny and not part["rank"] else "bfloat16",
            "remat": "elementwise",
            "scan_layers": bool(part["rank"]) or args.scan,
        },
        "data": {
            # A pair has at most two of these; rows are as long as two.
            "sequence_len": 256 if tiny else 4096,
            "datasets": [{"path": str(folder / "pairs.jsonl")}],
            "prefetch": 4,
        },
        "optim": {"learning_rate": 1e-6, "gradient_accumulation_steps": micro},
        "checkpoint": {"every": 10**6, "every_minutes": None},
        "log": {"plot": False, "console": "off"},
    }
    if part["kind"] == "dpo":
        table["task"] = {"kind": "preference", "loss": "sigmoid"}
    else:
        table["task"] = {"kind": "reward_model"}
    if part["rank"]:
        table["adapter"] = {"kind": "lora", "rank": part["rank"]}
    path = folder / f"{name}.json"
    path.write_text(json.dumps(table))
    return path


def run_ours(
    part: dict, args: argparse.Namespace, folder: Path, name: str, limit: float, mean: float
) -> list[dict]:
    """Return one row: our run of a part."""
    config = write_config(part, args, folder, name)
    path = folder / name / "metrics.jsonl"

    def read_steps() -> list[dict]:
        return [line for line in read_lines(path) if "loss" in line and "tokens" in line]

    command = [sys.executable, "-m", "jaxtrain.main", "--config", str(config), *args.words]
    start = time.perf_counter()
    # It is ended before its last step, which would save gigabytes.
    expected = WARM_UP + part["steps"]
    output, late = run_limited(command, limit, lambda: len(read_steps()) >= expected)
    seconds = time.perf_counter() - start
    steps = read_steps()[:expected]
    how = "trees, packed" + (", LoRA on bf16 weights" if part["rank"] else "")
    if len(steps) < WARM_UP + 3:
        return [{"how": how, "failed": shorten(f"{late}: {output}", 600), "whole_s": seconds}]
    timed = steps[WARM_UP:]
    times = [line["time"] for line in timed]
    tokens = sum(line["tokens"] for line in timed[1:])
    return [
        {
            "how": how,
            "pairs_per_s": tokens / mean / (times[-1] - times[0]),
            "tokens_per_s": tokens / (times[-1] - times[0]),
            "step_s": statistics.median(np.diff(times).tolist()),
            "steps": len(timed) - 1,
            "pairs_per_step": tokens / mean / (len(timed) - 1),
            "peak_gib": timed[-1]["peak_memory_gib"],
            "loss": [steps[0]["loss"], steps[-1]["loss"]],
            "whole_s": seconds,
        }
    ]


def run_trl(
    part: dict, args: argparse.Namespace, folder: Path, name: str, limit: float, mean: float
) -> list[dict]:
    """A row for each setting of TRL."""
    rows = folder / f"{name}.rows.jsonl"
    job = {
        "raw": MODELS[part["model"]],
        "kind": part["kind"],
        "rank": part["rank"],
        "tokenizer": str(folder / "tokenizer"),
        "pairs": str(folder / "pairs.jsonl"),
        "rows": str(rows),
        "mean": mean,
        "seconds": args.seconds,
        "deadline": time.time() + limit,
        "work": str(folder / "trl"),
    }
    path = folder / f"{name}.job.json"
    path.write_text(json.dumps(job))
    output, late = run_limited(
        [sys.executable, str(HERE / "peers/preference.py"), str(path)], limit
    )
    lines = read_lines(rows)
    if late or not lines:
        lines.append({"how": "the rest", "failed": shorten(f"{late}: {output}", 600)})
    return lines


COLUMNS = (
    ("part", "part", "<13"),
    ("by", "by", "<10"),
    ("pairs/s", "pairs_per_s", ">8.2f"),
    ("x best", "x_best", ">8.2f"),
    ("tok/s", "tokens_per_s", ">9,.0f"),
    ("step s", "step_s", ">9.3f"),
    ("peak GiB", "peak_gib", ">10.2f"),
    ("whole s", "whole_s", ">9.1f"),
)


def compare(rows: list[dict]) -> None:
    """Set "x_best": pairs/s over TRL's best pairs/s in the same part."""
    for row in (row for row in rows if "failed" not in row):
        best = max(
            (
                peer["pairs_per_s"]
                for peer in rows
                if (peer["part"], peer["by"]) == (row["part"], "TRL") and "failed" not in peer
            ),
            default=None,
        )
        row["x_best"] = best and row["pairs_per_s"] / best


def find_versions() -> str:
    """Versions of what is compared."""
    actual = []
    for name in ("jax", "torch", "transformers", "trl", "peft", "liger-kernel"):
        try:
            actual.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(actual)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--size", default="full", choices=("full", "tiny"))
    parser.add_argument("--parts", nargs="+", default=[*PARTS], choices=[*PARTS])
    parser.add_argument("--by", nargs="+", default=["jaxtrain", "TRL"])
    parser.add_argument("--pairs", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=9.0, help="TRL's timed steps, a setting")
    parser.add_argument("--budget", type=float, default=560.0, help="seconds for all parts")
    parser.add_argument("--scan", action="store_true", help="one compiled layer: starts sooner")
    parser.add_argument("words", nargs="*", help="further keys for our runs, section.key=value")
    args = parser.parse_args()
    tiny = args.size == "tiny"
    if tiny:
        for part in PARTS.values():
            part |= {"model": "tiny", "limit": (300, 300)}
    deadline = time.monotonic() + args.budget
    lengths = draw_lengths(args.pairs, 16 if tiny else 1)
    # Each answer's end counts, too.
    means = {"jaxtrain": float(lengths.sum(1).mean()) + 2}
    means["TRL"] = means["jaxtrain"] + float(lengths[:, 0].mean())
    hardware = f"{query_gpu()}; {find_versions()}"
    table = Table(COLUMNS, args.out, command_line(), hardware=hardware, mean_tokens=means)
    print(f"{hardware}; tokens of a pair: {means}", flush=True)
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        vocabulary = MODELS["tiny" if tiny else "qwen3-0.6b"]["vocab_size"]
        write_pairs(folder / "pairs.jsonl", lengths, vocabulary)
        write_tokenizer(folder / "tokenizer", vocabulary)
        for name, by in ORDER:
            if name not in args.parts or by not in args.by:
                continue
            run = run_ours if by == "jaxtrain" else run_trl
            limit = min(deadline - time.monotonic(), PARTS[name]["limit"][by == "TRL"])
            if limit < 25:
                rows = [{"how": "not started", "failed": "no time left"}]
            else:
                rows = run(PARTS[name], args, folder, f"{name}-{by}", limit, means[by])
            for row in rows:
                row |= {"part": name, "by": by}
                compare([*table.rows, row])
                table.add(row)
    print("\n" + table.text(), flush=True)


if __name__ == "__main__":
    main()
