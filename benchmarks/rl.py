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
equal      least share, over all rounds, of log-probs that the first update computes as they were
           drawn, to the bit; 1 with rollout.exact=true
off        largest difference of such a log-prob, over all rounds
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from harness import Table, command_line, make_parser, query_gpu, read_lines
from step_work import MODELS

from jaxtrain.generation.engine import Engine, Sampling
from jaxtrain.generation.episodes import Env, Episode

WARM_UP = 2
MODES = ("sync", "streaming", "prefetch", "async")


class Lengths(Env):
    """A random prompt and one answer, whose reward differs in a group.

    Answers have sampling.max_new_tokens tokens, or with `spread` a random share of them, as answers
    have that end by themselves: 1/8 to 1, evenly in the logarithm.
    """

    def __init__(self, tokenizer, prompt: int = 256, vocab: int = 512, spread: bool = False):
        self.prompt, self.vocab, self.spread = prompt, vocab, spread

    async def run(self, row: dict, engine: Engine, sampling: Sampling, index: int) -> Episode:
        draw = random.Random(str(row["problems"]))
        prompt = [draw.randrange(self.vocab) for _ in range(self.prompt)]
        if self.spread:
            share = 8 ** -random.Random(index).random()
            limit = max(1, int(share * sampling.max_new_tokens))
            sampling = sampling.model_copy(update={"max_new_tokens": limit})
        answer = await engine.generate(prompt, sampling, (), index)
        n, m = len(prompt), len(answer.tokens)
        return Episode(
            tokens=[*prompt, *answer.tokens],
            sampled=[False] * n + [True] * m,
            logprobs=[0.0] * n + list(answer.logprobs),
            versions=[-1] * n + list(answer.versions),
            finish_reason=answer.finish_reason,
            rewards={"even": sum(token % 2 == 0 for token in answer.tokens) / m},
        )


def add_sizes(parser: argparse.ArgumentParser, prompts: int, group: int, prompt: int, new: int):
    """Add the sizes of rounds that all runs have, with these defaults."""
    parser.add_argument("--model", default="qwen3-0.6b", choices=sorted(MODELS))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompts", type=int, default=prompts, help="of a round")
    parser.add_argument("--group", type=int, default=group, help="answers to a prompt")
    parser.add_argument("--prompt", type=int, default=prompt, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=new, help="most tokens of an answer")
    parser.add_argument("--rounds", type=int, default=8)


def base_config(args: argparse.Namespace, row: int) -> dict:
    """Return what all runs have in common; row: tokens of a row, rounded up."""
    return {
        "run": {"max_steps": args.rounds, "export": False},
        "model": {
            "tokenizer": "builtin",
            "compute_dtype": args.dtype,
            "architecture": MODELS[args.model],
        },
        "data": {"sequence_len": -(-row // 128) * 128, "micro_batch_size": 1},
        "rollout": {
            "prompts_per_step": args.prompts,
            "group_size": args.group,
            "max_batch": args.prompts * args.group,
        },
        "sampling": {"temperature": 1.0, "max_new_tokens": args.new},
        "optim": {"learning_rate": 1e-6},
        "checkpoint": {"every": 10**6},
        "log": {"plot": False, "console": "off"},
    }


def make_config(args: argparse.Namespace) -> dict:
    """A run's config with everything but the mode."""
    table = base_config(args, args.prompt + args.group * args.new)  # a tree: its prompt once
    table["run"]["max_steps"] *= args.minibatches
    table["data"]["datasets"] = [{"path": "builtin:calculator", "options": {"num_rows": 1000}}]
    table["task"] = {"kind": "rl", "importance_correction": "token_truncate"}
    table["task"]["num_minibatches"] = args.minibatches
    table["rollout"] |= {"max_lag": 2} | ({"max_batch": args.max_batch} if args.max_batch else {})
    options = {"prompt": args.prompt, "vocab": MODELS[args.model]["vocab_size"]}
    table["env"] = {"kind": "python", "path": f"{Path(__file__)}:Lengths"}
    table["env"]["options"] = options | {"spread": args.spread}
    return table


def run_config(table: dict, folder: Path, words: list[str]) -> list[dict]:
    """Run a config by the command line and return its lines of metrics, each with its time."""
    folder.mkdir()
    config = folder / "config.json"
    config.write_text(json.dumps(table))
    command = [sys.executable, "-m", "jaxtrain.main", "--config", str(config)]
    command += [f"run.output_dir={folder / 'run'}", *words]
    # The run imports this file, too, for its environment.
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path}
    completed = subprocess.run(command, capture_output=True, text=True, env=environment)
    if completed.returncode:
        output = completed.stdout[-1500:] + completed.stderr
        raise SystemExit(f"{folder.name}: exit {completed.returncode}\n{output}")
    return [line for line in read_lines(folder / "run" / "metrics.jsonl") if "loss" in line]


def median(rounds: list[dict], name: str) -> float:
    """Return the median of a metric over rounds."""
    return statistics.median(line.get(name, 0.0) for line in rounds)


def round_seconds(rounds: list[dict]) -> float:
    """Return the median time from round to round."""
    times = [line["time"] for line in rounds]
    return statistics.median(b - a for a, b in zip(times, times[1:], strict=False))


def summarize(mode: str, lines: list[dict], minibatches: int) -> dict:
    """Return one row of the table."""
    # A round's numbers stand in one of its lines.
    rounds = [line for line in lines if "num_sampled_tokens" in line][WARM_UP - 1 :]
    timed, round_s = rounds[1:], round_seconds(rounds)
    steps = [line for line in lines[WARM_UP * minibatches :] if "step_seconds" in line]
    drawn, wait = median(timed, "num_sampled_tokens"), median(timed, "rollout/seconds")
    train = minibatches * median(steps, "step_seconds")
    return {
        "mode": mode,
        "minibatches": minibatches,
        "rounds": len(timed),
        "round s": round_s,
        "wait s": wait,
        "sync s": median(timed, "sync/seconds"),
        "train s": train,
        "tokens": drawn,
        "sample tok/s": drawn / (wait if mode == "sync" else round_s),
        "train tok/s": median(timed, "num_tokens") / train,
        "lag": statistics.mean(line["lag/mean"] for line in timed),
        "equal": min(line["mismatch/exact"] for line in lines if "mismatch/exact" in line),
        "off": max(line.get("mismatch/max_abs", 0.0) for line in lines),
    }


COLUMNS = (
    ("mode", "mode", "<10"),
    ("rounds", "rounds", ">6"),
    *((name, name, ">9.3f") for name in ("round s", "wait s", "sync s", "train s")),
    ("sample tok/s", "sample tok/s", ">13,.0f"),
    ("train tok/s", "train tok/s", ">12,.0f"),
    ("lag", "lag", ">6.2f"),
    ("equal", "equal", ">8.4f"),
    ("off", "off", ">8.1e"),
)


def main() -> None:
    parser = make_parser(__doc__)
    add_sizes(parser, 8, 16, 256, 1024)
    parser.add_argument("--modes", nargs="+", default=["sync", "prefetch", "async"], choices=MODES)
    parser.add_argument("--devices", type=int, default=0, help="set aside for sampling")
    parser.add_argument("--max-batch", type=int, help="rows decoded together; default: a round's")
    parser.add_argument("--spread", action="store_true", help="answers of different lengths")
    parser.add_argument("--minibatches", type=int, default=1, help="optimizer steps of a round")
    parser.add_argument("words", nargs="*", help="further overrides, section.key=value")
    args = parser.parse_args()
    table = Table(COLUMNS, args.out, command_line(), hardware=query_gpu())
    with tempfile.TemporaryDirectory() as folder:
        for mode in args.modes:
            config = make_config(args)
            streaming = mode == "streaming"
            config["rollout"] |= {"mode": "sync" if streaming else mode, "streaming": streaming}
            config["rollout"]["devices"] = args.devices
            lines = run_config(config, Path(folder) / mode, args.words)
            table.add(summarize(mode, lines, args.minibatches))


if __name__ == "__main__":
    main()
