"""A target and its drafts trained from nothing on GSM8K, then speculative against plain decoding.

python benchmarks/draft_pair.py DATA --out benchmarks/results/draft_pair_h200
python benchmarks/draft_pair.py DATA --size tiny --budget 900   # on a CPU, to see that it works

DATA holds gsm8k_train.jsonl and gsm8k_test.jsonl (question, answer) and the folder qwen2_tokenizer.

    target      a Qwen3 of 24 layers and width 768 (282M parameters), random weights, all tokens of
                the training conversations
    answers     its own greedy answers to some training questions
    drafts      on the data's answers and its own, at once: DFlash of 2 layers and blocks of 8, and
                Eagle3 with 5 guesses
    decoding    test questions, greedily, plainly and with each draft, by number of rows

Training is the ordinary command line. What decodes (draft_decoding.py) is one process that
compiles while the target trains: a program of 24 unrolled layers takes longer to compile than to
run. Nothing else runs while it is timed. Drafts are shallow because decoding one row costs launches
and bytes of weights, a layer as much in a draft as in the target.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

SUFFIX = "\nPlease reason step by step, and put your final answer within \\boxed{}."
"""As the benchmark's prompts end."""
HERE = Path(__file__).parent
SHAPES = {
    "full": {"width": 768, "ffn": 2304, "layers": 24, "heads": 12, "kv": 4, "head": 64},
    "tiny": {"width": 32, "ffn": 64, "layers": 6, "heads": 2, "kv": 1, "head": 16},
}
READ = {
    "full": {"dflash": [1, 8, 16, 22], "eagle3": [1, 12, 22]},
    "tiny": {"dflash": [1, 2, 4, 5], "eagle3": [1, 3, 5]},
}
"""Layers of the target that the drafts read."""
DRAFTS = ("dflash", "eagle3")
RUNS = {
    "full": {
        "target": {"steps": 300, "rows": 16, "length": 1024, "rate": 2e-3},
        "dflash": {"steps": 600, "rows": 8, "length": 1024, "rate": 2e-3, "anchors": 256},
        "eagle3": {"steps": 450, "rows": 8, "length": 1024, "rate": 2e-3, "kept": 8192},
        "unroll": 5,
    },
    "tiny": {
        "target": {"steps": 4, "rows": 1, "length": 512, "rate": 3e-3},
        "dflash": {"steps": 3, "rows": 1, "length": 512, "rate": 3e-3, "anchors": 16},
        "eagle3": {"steps": 3, "rows": 1, "length": 512, "rate": 3e-3, "kept": 256},
        "unroll": 3,
    },
}


def architecture(size: str) -> dict:
    """config.json of the target."""
    shape = SHAPES[size]
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": shape["width"],
        "intermediate_size": shape["ffn"],
        "num_hidden_layers": shape["layers"],
        "num_attention_heads": shape["heads"],
        "num_key_value_heads": shape["kv"],
        "head_dim": shape["head"],
        "hidden_act": "silu",
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
    }


def compute_dtype(size: str) -> str:
    """Return the dtype of products, and of weights that are not trained."""
    return "bfloat16" if size == "full" else "float32"


def write_rows(source: Path, target: Path) -> None:
    """Questions in the words of the benchmark's prompts."""
    rows = map(json.loads, source.read_text().strip().split("\n"))
    lines = [json.dumps({**row, "question": row["question"] + SUFFIX}) for row in rows]
    target.write_text("\n".join(lines) + "\n")


def make_config(args, stage: str) -> dict:
    """The run of the target, or of a draft, as a config's table."""
    run, dtype, work = RUNS[args.size][stage], compute_dtype(args.size), args.work
    dataset = {
        "path": str(work / "train.jsonl"),
        "fields": {"prompt": "question", "completion": "answer"},
        "format": "prompt_completion",
        "as_chat": True,
        "train_on": "all" if stage == "target" else "assistant",
    }
    datasets = [dataset]
    if stage != "target" and (work / "answers.jsonl").exists():
        local_value = dataset | {"path": str(work / "answers.jsonl"), "weight": 1.0}
        datasets = [dataset | {"weight": 1.0}, local_value]
    table = {
        "run": {"max_steps": run["steps"], "output_dir": str(work / stage)},
        "data": {
            "sequence_len": run["length"],
            "micro_batch_size": run["rows"],
            "num_workers": 4 if args.size == "full" else 0,
            "datasets": datasets,
        },
        "optim": {
            "name": "muon",
            "learning_rate": run["rate"],
            "lr_scheduler": "cosine",
            "warmup_ratio": 0.05,
            "beta1": 0.95,
            "beta2": 0.95,
        },
        "checkpoint": {"every": 10**6, "every_minutes": None},
        "log": {"every": max(1, run["steps"] // 10), "plot": False},
    }
    if stage == "target":
        tokenizer = str(args.data / "qwen2_tokenizer")
        table["model"] = {"architecture": architecture(args.size), "tokenizer": tokenizer}
        table["model"] |= {"compute_dtype": dtype}
        return table
    table["model"] = {"path": str(work / "target/model"), "param_dtype": dtype}
    table["model"] |= {"compute_dtype": dtype}
    draft: dict = {"target_layers": READ[args.size][stage]}
    table["task"] = {"kind": stage, "min_loss_tokens": 16, "draft": draft}
    if stage == "dflash":
        table["task"] |= {"block_size": 8, "num_anchors": run["anchors"], "decay": 7.0}
        draft["num_layers"] = 2
    else:
        table["task"] |= {"length": RUNS[args.size]["unroll"], "draft_vocab_size": run["kept"]}
    return table


def log(text: str) -> None:
    """A line of progress."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


class Child:
    """A process whose output goes into a file."""

    def __init__(self, name: str, command: list[str], folder: Path):
        self.name, self.began = name, time.monotonic()
        self.log = folder / f"{name}.log"
        # Several processes share the GPU: none takes memory that it does not need.
        environment = {
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            "HF_HUB_OFFLINE": "1",
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        }
        self.process = subprocess.Popen(
            command,
            stdout=self.log.open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment,
        )
        log(f"{name}: started")

    @property
    def runs(self) -> bool:
        """True until the process ends."""
        return self.process.poll() is None

    def end(self) -> None:
        """Kill it and all that it started."""
        if self.runs:
            os.killpg(self.process.pid, signal.SIGKILL)

    def wait(self, deadline: float, done: Callable[[], bool] = lambda: False) -> bool:
        """Until it ends, is done, or the time is over; whether it did what it should."""
        while self.runs and time.monotonic() < deadline and not done():
            time.sleep(0.3)
        good = done() or self.process.poll() == 0
        how = "done" if good else "out of time" if self.runs else f"exit {self.process.poll()}"
        log(f"{self.name}: {how} after {time.monotonic() - self.began:.0f} s")
        return good


def train(args, stage: str) -> Child:
    """A training run, begun."""
    path = args.work / f"{stage}.json"
    path.write_text(json.dumps(make_config(args, stage), indent=1))
    return Child(stage, [sys.executable, "-m", "jaxtrain.main", "--config", str(path)], args.work)


def go_through(args, children: list[Child]) -> None:
    """Run all stages; the decoding process writes the report."""
    end = time.monotonic() + args.budget
    target = train(args, "target")
    words = [str(args.data), "--size", args.size, "--work", str(args.work)]
    decoding = Child(
        "decoding", [sys.executable, str(HERE / "draft_decoding.py"), *words], args.work
    )
    children += [target, decoding]

    def told(name: str) -> bool:
        return (args.work / "gate" / name).exists()

    if not target.wait(end):
        return
    (args.work / "gate/answers.go").touch()
    decoding.wait(min(end, time.monotonic() + 0.2 * args.budget), lambda: told("answers.done"))
    drafts = [train(args, stage) for stage in DRAFTS]
    children += drafts
    for draft in drafts:
        draft.wait(end)
        draft.end()
    (args.work / "gate/decode.go").touch()
    decoding.wait(end)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="folder with GSM8K and a tokenizer")
    parser.add_argument("--size", default="full", choices=[*SHAPES])
    parser.add_argument("--budget", type=float, default=400.0, help="seconds for everything")
    parser.add_argument("--work", type=Path, default=Path("runs/draft_pair"), help="a new folder")
    parser.add_argument("--out", type=Path, help="path without suffix for JSON and text")
    args = parser.parse_args()
    (args.work / "gate").mkdir(parents=True)
    write_rows(args.data / "gsm8k_train.jsonl", args.work / "train.jsonl")
    children: list[Child] = []
    try:
        go_through(args, children)
    finally:
        for child in children:
            child.end()
        text = "".join(
            f"# {entry.name}\n{entry.log.read_text(errors='replace')}\n" for entry in children
        )
        print(text[-6000:], flush=True)
        report = args.work / "decoding.json"
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.with_suffix(".txt").write_text(text)
            if report.exists():
                args.out.with_suffix(".json").write_text(report.read_text())


if __name__ == "__main__":
    main()
