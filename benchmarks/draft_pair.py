"""A target and its drafts trained from nothing on GSM8K, then speculative against plain decoding.

python benchmarks/draft_pair.py DATA --out benchmarks/results/draft_pair_h200
python benchmarks/draft_pair.py DATA --size tiny --budget 600   # on a CPU, to see that it works

DATA holds gsm8k_train.jsonl and gsm8k_test.jsonl (question, answer) and the folder qwen2_tokenizer.
Stages, each a process of its own with the ordinary command line, until --budget is used up:

target    a Qwen3 of 24 layers and width 768 (282M parameters), random weights, all tokens of the
          training conversations
answers   its own greedy answers to the training questions, which the drafts learn from
dflash    a draft of 2 layers and blocks of 8, on these answers
eagle3    a draft of one layer, unrolled 5 times
speculate test questions, greedily, with each draft and without, by number of rows

Drafts are shallow because decoding one row costs launches and bytes of weights, a layer as much in
a draft as in the target.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

SUFFIX = "\nPlease reason step by step, and put your final answer within \\boxed{}."
"""As the benchmark's prompts end."""
HERE = Path(__file__)
SHAPES = {
    "full": {"width": 768, "ffn": 2304, "layers": 24, "heads": 12, "kv": 4, "head": 64},
    "tiny": {"width": 32, "ffn": 64, "layers": 6, "heads": 2, "kv": 1, "head": 16},
}
READ = {
    "full": {"dflash": [1, 8, 16, 22], "eagle3": [1, 12, 22]},
    "tiny": {"dflash": [1, 2, 4, 5], "eagle3": [1, 3, 5]},
}
"""Layers of the target that the drafts read."""
RUNS = {
    "full": {
        "target": {"steps": 500, "rows": 16, "length": 1024, "rate": 2e-3},
        "dflash": {"steps": 900, "rows": 8, "length": 1024, "rate": 2e-3, "anchors": 256},
        "eagle3": {
            "steps": 600,
            "rows": 8,
            "length": 1024,
            "rate": 2e-3,
            "kept": 8192,
            "unroll": 5,
        },
        "answers": 7473,
        "new": 256,
    },
    "tiny": {
        "target": {"steps": 6, "rows": 1, "length": 512, "rate": 3e-3},
        "dflash": {"steps": 4, "rows": 1, "length": 512, "rate": 3e-3, "anchors": 16},
        "eagle3": {"steps": 4, "rows": 1, "length": 512, "rate": 3e-3, "kept": 256, "unroll": 3},
        "answers": 8,
        "new": 24,
    },
}
LIMITS = {
    "target": 150.0,
    "answers": 100.0,
    "dflash": 190.0,
    "eagle3": 190.0,
    "speculate dflash": 190.0,
    "speculate eagle3": 120.0,
}
"""Seconds of each stage at most."""
ORDER = (
    ("target",),
    ("answers",),
    ("dflash", "eagle3"),  # at once: the one computes while the other compiles
    ("speculate dflash",),
    ("speculate eagle3",),
)


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


def write_rows(source: Path, target: Path) -> None:
    """Questions in the words of the benchmark's prompts."""
    rows = map(json.loads, source.read_text().strip().split("\n"))
    lines = [json.dumps({**row, "question": row["question"] + SUFFIX}) for row in rows]
    target.write_text("\n".join(lines) + "\n")


def write_config(args, stage: str, work: Path) -> Path:
    """The run of a stage, as JSON."""
    run, dtype = RUNS[args.size][stage], "bfloat16" if args.size == "full" else "float32"
    table = {
        "run": {"max_steps": run["steps"], "output_dir": str(work / stage)},
        "data": {
            "sequence_len": run["length"],
            "micro_batch_size": run["rows"],
            "num_workers": 4 if args.size == "full" else 0,
            "datasets": [
                {
                    "path": str(work / ("train.jsonl" if stage == "target" else "answers.jsonl")),
                    "fields": {"prompt": "question", "completion": "answer"},
                    "format": "prompt_completion",
                    "as_chat": True,
                    "train_on": "all" if stage == "target" else "assistant",
                }
            ],
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
        tokenizer = str(Path(args.data) / "qwen2_tokenizer")
        table["model"] = {"architecture": architecture(args.size), "tokenizer": tokenizer}
        table["model"] |= {"compute_dtype": dtype}
    else:
        table["model"] = {"path": str(work / "target/model"), "param_dtype": dtype}
        table["model"] |= {"compute_dtype": dtype}
        table["task"] = {"kind": stage, "min_loss_tokens": 16}
        if stage == "dflash":
            table["task"] |= {"block_size": 8, "num_anchors": run["anchors"], "decay": 7.0}
            table["task"]["draft"] = {"num_layers": 2, "target_layers": READ[args.size][stage]}
        else:
            table["task"] |= {"length": run["unroll"], "draft_vocab_size": run["kept"]}
            table["task"]["draft"] = {"target_layers": READ[args.size][stage]}
    path = work / f"{stage}.json"
    path.write_text(json.dumps(table, indent=1))
    return path


def answer(args, work: Path) -> None:
    """The target's greedy answers to the training questions, into answers.jsonl."""
    import jax

    from jaxtrain.api import Model
    from jaxtrain.data.template import end_of_turn_ids, prompt_tokens
    from jaxtrain.rollout.local.sampler import LocalSampler
    from jaxtrain.rollout.local.slots import unstack
    from jaxtrain.rollout.types import Sampling

    run = RUNS[args.size]
    dtype = "bfloat16" if args.size == "full" else "float32"
    words = [f"model.param_dtype={dtype}", f"model.compute_dtype={dtype}"]
    model = Model(str(work / "target/model"), words)
    lines = (work / "train.jsonl").read_text().strip().split("\n")
    rows = [json.loads(line) for line in lines[: run["answers"]]]
    prompts = [
        prompt_tokens(model.tokenizer, [{"role": "user", "content": row["question"]}], None)
        for row in rows
    ]
    with jax.set_mesh(model.mesh):
        weights = unstack(model.held.model())
    sampler = LocalSampler(
        weights,
        end_of_turn_ids(model.tokenizer, False),
        max_len=1024,
        max_batch=512 if args.size == "full" else 8,
        mesh=model.mesh,
    )
    began = time.perf_counter()
    found = sampler.generate(prompts, Sampling(temperature=0.0, max_new_tokens=run["new"]))
    seconds = time.perf_counter() - began
    whole = 0
    with (work / "answers.jsonl").open("w") as file:
        for row, one in zip(rows, found, strict=True):
            ended = one.finish_reason != "length"
            whole += ended
            text = model.tokenizer.decode(one.tokens, skip_special_tokens=True).strip()
            if args.size == "tiny":  # whose answers are noise
                text = row["answer"]
            elif not ended:
                continue
            file.write(json.dumps({"question": row["question"], "answer": text}) + "\n")
    tokens = sum(len(one.tokens) for one in found)
    print(f"{len(found)} answers of {tokens:,} tokens in {seconds:.1f} s, {whole} ended")
    print("one of them:", model.tokenizer.decode(found[0].tokens))


def command_of(args, stage: str, work: Path) -> list[str]:
    """What runs a stage."""
    program = [sys.executable, "-m", "jaxtrain.main"]
    if stage == "answers":
        words = ["--size", args.size, "--work", str(work), "--child"]
        return [sys.executable, str(HERE), str(args.data), *words]
    if not stage.startswith("speculate"):
        return [*program, "--config", str(write_config(args, stage, work))]
    draft = stage.split()[1]
    full = args.size == "full"
    dtype = "bfloat16" if full else "float32"
    few = ["1", "16"] if draft == "eagle3" else ["1", "16", "64", "4"]
    return [
        *program,
        "speculate",
        str(work / "target/model"),
        "--draft",
        str(work / f"{draft}/model"),
        "--set",
        f"gsm8k={Path(args.data) / 'gsm8k_test.jsonl'}",
        "--most",
        str(args.most if full else 2),
        "--rows",
        *(few if full else ["1", "2"]),
        "--output",
        str(work / f"speculate_{draft}.json"),
        "sampling.temperature=0",
        f"sampling.max_new_tokens={RUNS[args.size]['new']}",
        f"model.param_dtype={dtype}",
        f"model.compute_dtype={dtype}",
    ]


def run_limited(command: list[str], limit: float, log: Path, memory: float) -> str | None:
    """Run a stage with that share of the GPU's memory, printing what it prints, into `log` as well;
    why it failed, if it did."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    environment["XLA_PYTHON_CLIENT_MEM_FRACTION"] = str(memory)
    # Programs of plain decoding are compiled once for all stages that decode.
    environment.setdefault("JAX_COMPILATION_CACHE_DIR", str(log.parent / "compiled"))
    began = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment,
        )
        shown = 0
        while True:
            try:
                process.wait(1.0)
            except subprocess.TimeoutExpired:
                pass
            text = log.read_text(errors="replace")
            sys.stdout.write(text[shown:])
            sys.stdout.flush()
            shown = len(text)
            if process.returncode is not None:
                return f"exit {process.returncode}" if process.returncode else None
            if time.monotonic() - began > limit:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                return f"cut off after {limit:.0f} s"


def run_stage(args, work: Path, deadline: float, share: float, stage: str) -> dict:
    """One stage's row of the report."""
    left = min(deadline - time.monotonic(), LIMITS[stage] if args.size == "full" else 900.0)
    if left < 15:
        return {"stage": stage, "failed": "no time left"}
    print(f"[{time.strftime('%H:%M:%S')}] {stage}, at most {left:.0f} s", flush=True)
    log, began = work / f"{stage.replace(' ', '_')}.log", time.monotonic()
    failed = run_limited(command_of(args, stage, work), left, log, share)
    row = {"stage": stage, "seconds": time.monotonic() - began}
    if failed:
        row["failed"] = failed
    found = log.with_suffix(".json")
    if stage.startswith("speculate") and found.exists():
        row["report"] = json.loads(found.read_text())
    print(f"[{time.strftime('%H:%M:%S')}] {stage}: {failed or 'done'}", flush=True)
    return row | {"log": log.read_text(errors="replace")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="folder with GSM8K and a tokenizer")
    parser.add_argument("--size", default="full", choices=[*SHAPES])
    parser.add_argument("--budget", type=float, default=560.0, help="seconds for all stages")
    parser.add_argument("--most", type=int, default=64, help="test questions")
    parser.add_argument("--stages", nargs="+", default=[*LIMITS], help="only these")
    parser.add_argument("--work", type=Path, default=Path("runs/draft_pair"))
    parser.add_argument("--out", type=Path, help="path without suffix for JSON and text")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    work = args.work
    if args.child:
        answer(args, work)
        return
    work.mkdir(parents=True, exist_ok=True)
    write_rows(args.data / "gsm8k_train.jsonl", work / "train.jsonl")
    deadline, report, text = time.monotonic() + args.budget, {"stages": []}, ""
    for together in ORDER:
        stages = [stage for stage in together if stage in args.stages]
        if "answers" not in stages and not (work / "answers.jsonl").exists():
            shutil.copy(work / "train.jsonl", work / "answers.jsonl")  # the data's own, then
        share = 0.9 / max(len(stages), 1)
        with ThreadPoolExecutor() as pool:
            run = partial(run_stage, args, work, deadline, share)
            for row in pool.map(run, stages):
                text += f"# {row['stage']}\n{row.pop('log', '')}\n"
                report["stages"].append(row)
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
            args.out.with_suffix(".txt").write_text(text)
    for row in report["stages"]:
        print(f"{row['stage']:<18}{row.get('seconds', 0):>7.1f} s  {row.get('failed', 'done')}")


if __name__ == "__main__":
    main()
