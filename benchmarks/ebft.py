"""Rounds of structured EBFT with the local sampler: what the features cost.

python benchmarks/ebft.py --out benchmarks/results/ebft_h200
python benchmarks/ebft.py --model tiny --prompts 2 --group 2 --prompt 32 --new 16 --rounds 4

Every pooling is a run of the ordinary command with random weights, --prompts x --group answers a
round, all of --new tokens as the ground truth is. In the last run every ground truth was met before
(--prompts of them in all).

round s    wall-clock from round to round, median after the first WARM_UP rounds
wait s     of it answers were drawn, the sampler's weights made and everything scored
feature s  of it the features of all answers, from packing to rewards
share      feature s / round s
"""

import argparse
import json
import random
import tempfile
from pathlib import Path

from harness import Table, command_line, make_parser, query_gpu
from rl import WARM_UP, add_sizes, base_config, median, round_seconds, run_config

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


def make_config(args: argparse.Namespace, folder: Path, name: str) -> dict:
    """A run's config."""
    rows = args.prompts if name == "known truths" else args.prompts * (args.rounds + 1)
    data = folder / f"{rows}.jsonl"
    write_rows(data, rows, args.prompt, args.new)
    # A group is one tree: its prompt once, the ground truth beside the answers; and ends of turns.
    table = base_config(args, args.prompt + (args.group + 1) * (args.new + 8))
    table["data"] |= {"micro_batch_size": args.rows, "datasets": [{"path": str(data)}]}
    table["task"] = {"kind": "ebft", "features": RUNS[name], "adaptive_max_tokens": False}
    return table | {"env": {"raw": True}}


def summarize(name: str, lines: list[dict]) -> dict:
    """Return one row of the table."""
    rounds = lines[WARM_UP - 1 :]
    timed, round_s = rounds[1:], round_seconds(rounds)
    features = median(timed, "ebft/feature_seconds")
    return {
        "run": name,
        "rounds": len(timed),
        "round s": round_s,
        "wait s": median(timed, "rollout/seconds"),
        "feature s": features,
        "share": features / round_s,
        "known": median(timed, "ebft/cached_truths"),
        "drawn tokens": median(timed, "num_sampled_tokens"),
        "peak GiB": max(line.get("peak_memory_gib", 0.0) for line in lines),
    }


COLUMNS = (
    ("run", "run", "<13"),
    ("rounds", "rounds", ">6"),
    *((name, name, ">10.3f") for name in ("round s", "wait s", "feature s")),
    ("share", "share", ">7.1%"),
    ("known", "known", ">7.2f"),
    ("drawn tokens", "drawn tokens", ">13,.0f"),
    ("peak GiB", "peak GiB", ">9.1f"),
)


def main() -> None:
    parser = make_parser(__doc__)
    add_sizes(parser, 32, 4, 512, 256)
    parser.add_argument("--rows", type=int, default=4, help="of a microstep")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("words", nargs="*", help="further overrides, section.key=value")
    args = parser.parse_args()
    table = Table(COLUMNS, args.out, command_line(), hardware=query_gpu())
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        for name in args.runs:
            lines = run_config(make_config(args, folder, name), folder / name, args.words)
            table.add(summarize(name, lines))


if __name__ == "__main__":
    main()
