"""Rounds of GRPO with the local sampler: synchronous against ahead of the trainer.

python benchmarks/rl.py --modes sync prefetch async --spread --out benchmarks/results/rl_h200
python benchmarks/rl.py --modes sync streaming --minibatches 2 --spread
python benchmarks/rl.py --modes sync async --devices 1 --spread      # on two GPUs, one samples

Every mode is a run of the ordinary command with random weights, 8 prompts x 16 answers a round;
--spread: answers of 1/8 to all of --new tokens, evenly in the logarithm, so that a round has a long
tail. "streaming" is sync with rollout.streaming.

round s    wall-clock from round to round, median after the first WARM_UP rounds
wait s     of it the trainer waited for answers
sync s     of it the sampler's weights were made
train s    of it the updates took
sample     drawn tokens / wait s in mode sync, else / round s
train      trained rows' tokens / train s
lag        mean age of the answers in rounds
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from step_work import MODELS

WARM_UP = 2
MODES = ("sync", "streaming", "prefetch", "async")
HERE = Path(__file__).parent


def write_config(args: argparse.Namespace, folder: Path) -> Path:
    """A run's config as JSON with everything but the mode."""
    vocab = MODELS[args.model]["vocab_size"]
    options = {"prompt": args.prompt, "vocab": vocab, "spread": args.spread}
    table = {
        "run": {"max_steps": args.rounds * args.minibatches, "export": False},
        "model": {
            "tokenizer": "builtin",
            "compute_dtype": args.dtype,
            "architecture": MODELS[args.model],
        },
        "data": {
            # A group is one tree: its prompt once.
            "sequence_len": -(-(args.prompt + args.group * args.new) // 128) * 128,
            "micro_batch_size": 1,
            "datasets": [{"path": "builtin:calculator", "options": {"num_rows": 1000}}],
        },
        "task": {
            "kind": "rl",
            "importance_correction": "token_truncate",
            "num_minibatches": args.minibatches,
        },
        "rollout": {
            "prompts_per_step": args.prompts,
            "group_size": args.group,
            "max_batch": args.max_batch or args.prompts * args.group,
            "max_lag": 2,
        },
        "env": {"kind": "python", "path": f"{HERE / 'rl_env.py'}:Lengths", "options": options},
        "sampling": {"temperature": 1.0, "max_new_tokens": args.new},
        "optim": {"learning_rate": 1e-6},
        "checkpoint": {"every": 10**6},
        "log": {"plot": False, "console": "off"},
    }
    path = folder / "rl.json"
    path.write_text(json.dumps(table))
    return path


def run_mode(config: Path, mode: str, devices: int, folder: Path, words: list[str]) -> list[dict]:
    """Lines of metrics of a run, each with the time at which it was written."""
    out = folder / f"{mode}_{devices}"
    command = [sys.executable, "-m", "jaxtrain.main", "--config", str(config)]
    command += [f"run.output_dir={out}", f"rollout.devices={devices}"]
    streaming = mode == "streaming"
    command += [f"rollout.mode={'sync' if streaming else mode}"]
    command += [f"rollout.streaming={'true' if streaming else 'false'}"]
    completed = subprocess.run([*command, *words], capture_output=True, text=True)
    if completed.returncode:
        raise SystemExit(
            f"{mode}: exit {completed.returncode}\n{completed.stdout[-1500:]}{completed.stderr}"
        )
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "loss" in line]


def summarize(mode: str, lines: list[dict], minibatches: int) -> dict:
    """Return one row of the table."""
    # A round's numbers stand in one of its lines.
    rounds = [line for line in lines if "num_sampled_tokens" in line][WARM_UP - 1 :]

    def median(name: str, where: list[dict]) -> float:
        return statistics.median(line.get(name, 0.0) for line in where)

    times = [line["time"] for line in rounds]
    round_s = statistics.median(b - a for a, b in zip(times, times[1:], strict=False))
    steps = [line for line in lines[WARM_UP * minibatches :] if "step_seconds" in line]
    drawn, wait = median("num_sampled_tokens", rounds[1:]), median("rollout/seconds", rounds[1:])
    train = minibatches * median("step_seconds", steps)
    alone = mode == "sync"
    return {
        "mode": mode,
        "minibatches": minibatches,
        "rounds": len(rounds) - 1,
        "round s": round_s,
        "wait s": wait,
        "sync s": median("sync/seconds", rounds[1:]),
        "train s": train,
        "tokens": drawn,
        "sample tok/s": drawn / (wait if alone else round_s),
        "train tok/s": median("num_tokens", rounds[1:]) / train,
        "lag": statistics.mean(line["lag/mean"] for line in rounds[1:]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen3-0.6b", choices=sorted(MODELS))
    parser.add_argument("--modes", nargs="+", default=["sync", "prefetch", "async"], choices=MODES)
    parser.add_argument("--devices", type=int, default=0, help="set aside for sampling")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=1024, help="most tokens of an answer")
    parser.add_argument("--max-batch", type=int, help="rows decoded together; default: a round's")
    parser.add_argument("--spread", action="store_true", help="answers of different lengths")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--minibatches", type=int, default=1, help="optimizer steps of a round")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", type=Path, help="path without suffix for the JSON file")
    parser.add_argument("words", nargs="*", help="further overrides, section.key=value")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        config = write_config(args, Path(folder))
        for mode in args.modes:
            start = time.perf_counter()
            lines = run_mode(config, mode, args.devices, Path(folder), args.words)
            rows.append(summarize(mode, lines, args.minibatches))
            values = {k: v if isinstance(v, str) else round(v, 3) for k, v in rows[-1].items()}
            took = time.perf_counter() - start
            print("  ".join(f"{k} {v}" for k, v in values.items()), f"({took:.0f} s)", flush=True)
    if args.out:
        args.out.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
