"""Rounds of structured EBFT with the local sampler: what the features cost.

python benchmarks/ebft.py --out benchmarks/results/ebft_h200
python benchmarks/ebft.py --model tiny --prompts 2 --group 2 --prompt 32 --new 16 --rounds 4

Every pooling is a run of the ordinary command with random weights, --prompts x --group answers a
round, all of --new tokens as the ground truth is. In the last run every ground truth was met before
(--distinct of them in all).

round s    wall-clock from round to round, median after the first WARM_UP rounds
wait s     of it answers were drawn, the sampler's weights made and everything scored
feature s  of it the features of all answers, from packing to rewards
share      feature s / round s
"""

import argparse
import json
import random
import statistics
import tempfile
from pathlib import Path

from rl import WARM_UP, run_mode
from step_work import MODELS

RUNS = {
    "last_token": {"pooling": "last_token"},
    "whitening": {"pooling": "last_token", "whitening": True},
    "mean_pooling": {"pooling": "mean_pooling"},
    "known truths": {"pooling": "last_token"},
}


def write_rows(path: Path, count: int, prompt: int, new: int) -> None:
    """Prompts and ground truths of about so many tokens: digits, a token each."""
    rng = random.Random(0)

    def digits(n: int) -> str:
        return "".join(rng.choices("0123456789", k=n))

    rows = [{"prompt": digits(prompt), "ground_truth": digits(new)} for _ in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_config(args: argparse.Namespace, folder: Path, name: str) -> Path:
    """A run's config as JSON."""
    rows = args.prompts if name == "known truths" else args.prompts * (args.rounds + 1)
    data = folder / f"{rows}.jsonl"
    write_rows(data, rows, args.prompt, args.new)
    # A group is one tree: its prompt once, the ground truth beside the answers; and ends of turns.
    row = -(-(args.prompt + (args.group + 1) * (args.new + 8)) // 128) * 128
    table = {
        "run": {"max_steps": args.rounds, "export": False},
        "model": {
            "tokenizer": "builtin",
            "compute_dtype": args.dtype,
            "architecture": MODELS[args.model],
        },
        "data": {
            "sequence_len": row,
            "micro_batch_size": args.rows,
            "datasets": [{"path": str(data)}],
        },
        "task": {"kind": "ebft", "features": RUNS[name], "adaptive_max_tokens": False},
        "rollout": {
            "prompts_per_step": args.prompts,
            "group_size": args.group,
            "max_batch": args.prompts * args.group,
        },
        "env": {"raw": True},
        "sampling": {"temperature": 1.0, "max_new_tokens": args.new},
        "optim": {"learning_rate": 1e-6},
        "checkpoint": {"every": 10**6},
        "log": {"plot": False, "console": "off"},
    }
    path = folder / f"{name.replace(' ', '_')}.json"
    path.write_text(json.dumps(table))
    return path


def summarize(name: str, lines: list[dict]) -> dict:
    """Return one row of the table."""
    rounds = lines[WARM_UP - 1 :]
    times = [line["time"] for line in rounds]
    round_s = statistics.median(b - a for a, b in zip(times, times[1:], strict=False))

    def median(key: str) -> float:
        return statistics.median(line[key] for line in rounds[1:])

    features = median("ebft/feature_seconds")
    return {
        "run": name,
        "rounds": len(rounds) - 1,
        "round s": round_s,
        "wait s": median("rollout/seconds"),
        "feature s": features,
        "share": features / round_s,
        "known": median("ebft/cached_truths"),
        "drawn tokens": median("num_sampled_tokens"),
        "peak GiB": max(line.get("peak_memory_gib", 0.0) for line in lines),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen3-0.6b", choices=sorted(MODELS))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompts", type=int, default=32, help="a round")
    parser.add_argument("--group", type=int, default=4, help="answers to a prompt")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=256, help="tokens of an answer, and of a truth")
    parser.add_argument("--rows", type=int, default=4, help="of a microstep")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--out", type=Path, help="PATH.json gets what was measured")
    args = parser.parse_args()
    actual = []
    with tempfile.TemporaryDirectory() as folder:
        for name in args.runs:
            config = write_config(args, Path(folder), name)
            out = Path(folder) / name.replace(" ", "_")
            out.mkdir()
            row = summarize(name, run_mode(config, "sync", 0, out, []))
            actual.append(row)
            if len(actual) == 1:
                print("  ".join(f"{key:>12}" for key in row))
            print(
                "  ".join(
                    f"{v:>12.4g}" if isinstance(v, float) else f"{v:>12}" for v in row.values()
                )
            )
    if args.out:
        shape = {key: value for key, value in vars(args).items() if key != "out"}
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.with_suffix(".json").write_text(json.dumps({"shape": shape, "runs": actual}))


if __name__ == "__main__":
    main()
