"""Every verb on a two-step run of configs that come with jaxtrain, made tiny.

    python -m tests.cli.verb_table FOLDER [CONFIG ...]      all of them without a name

A cell is "ok", the reason of a refusal, or WRONG with what a traceback ends in. FOLDER keeps the
models that configs start from, what was compiled, and table.jsonl, a line for each config: the
whole table is an hour on two cores, and goes on where it stopped. A few rows of it are
tests/cli/test_cli_verbs_of_configs.py.
"""

import contextlib
import io
import json
import os
import shutil
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from safetensors import safe_open

from jaxtrain.config import load_config
from jaxtrain.config.bundled import list_recipes
from jaxtrain.main import main
from tests.generation.fake_vllm import FakeVllm

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 2048,
}
CALCULATOR = '{{path="builtin:{}",split="{}",options={{num_rows={},follow_up=0.0}}}}'
EVALUATION = '{{path="builtin:calculator",options={{num_rows=2}}{}}}'
USAGE = {"final_input_tokens": 9, "final_output_tokens": 9}
PAIRS = ("preference", "reward_model")
FAMILIES = {
    "gpt-oss": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "vocab_size": 512,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "A3B": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": 512,
        "hidden_size": 64,  # of which nf4 needs multiples, for each layer
        "head_dim": 64,
        "moe_intermediate_size": 64,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
}
"""What a word in a model's name asks of the tiny model in its place."""


class World(NamedTuple):
    """Models and data that configs start from."""

    folder: Path
    """transcript.txt is all that commands have shown."""
    server: str = ""
    """URL of a scripted vLLM server."""
    tensors: Mapping[str, list[int]] = {}
    """Shapes of the base model's tensors."""

    def call(self, *words: object) -> str:
        """Run a command line; see `call`."""
        return call(self.folder / "transcript.txt", *words)

    @property
    def base(self) -> Path:
        """A language model."""
        return self.folder / "base/model"

    def family(self, name: str) -> Path:
        """A tiny language model of the family that a model's name says."""
        word = next((word for word in FAMILIES if word in name), None)
        return self.folder / word / "model" if word else self.base

    @property
    def draft(self) -> Path:
        """A DFlash draft of it."""
        return self.folder / "draft/model"


def call(transcript: Path, *words: object) -> str:
    """Run a command line; return "ok", "refused: REASON" or "WRONG: ERROR", and append what it
    shows to a file."""
    shown = io.StringIO()
    try:
        with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
            code = main([str(word) for word in words])
    except SystemExit as end:
        code = int(end.code or 0)
    except Exception as error:  # what would be a traceback
        return f"WRONG: {type(error).__name__}: {error}"[:300]
    finally:
        with transcript.open("a") as file:
            file.write(shown.getvalue())
    if code == 0:
        return "ok"
    for word in ("error: ", "stopped: "):
        _, begins, reason = shown.getvalue().rpartition(word)
        if begins:
            return f"refused: {' '.join(reason.split())}"
    return f"WRONG: code {code} without a reason"


def make_world(folder: Path, families: Sequence[str] = ()) -> World:
    """Train the models that configs start from, where they are not there yet."""
    world = World(folder)
    folder.mkdir(exist_ok=True)
    wanted = [(world.base, "quickstart", []), (world.draft, "dflash_quickstart", [])]
    for word in families:
        raw = ",".join(f"{key}={json.dumps(v)}" for key, v in (SIZES | FAMILIES[word]).items())
        words = [f"model.architecture={{{raw}}}"]
        wanted += [(world.family(word), "quickstart", words)]
    for place, name, more in wanted:
        if not place.exists():
            words = [*shrink(name, world), *more, f"run.output_dir={place.parent}"]
            done = world.call("--config", name, *words)
            assert done == "ok", f"{name}: {done}"
    with safe_open(world.base / "model.safetensors", "numpy") as file:
        tensors = {key: file.get_slice(key).get_shape() for key in file.keys()}
    return world._replace(server=FakeVllm(tensors=tensors).url, tensors=tensors)


def shrink(name: str, world: World) -> list[str]:
    """Return the overrides that make a config tiny and let it find all that it reads."""
    config = load_config(list_recipes()[name])
    kind, task = config.task.kind, config.task
    words = ["run.max_steps=2", "checkpoint.every=1", "checkpoint.keep=3", "parallel=null"]
    words += ["data.num_workers=0", "data.global_batch_size=null", "data.micro_batch_size=1"]
    words += ["optim.gradient_accumulation_steps=1", "sampling.max_new_tokens=4"]
    words += ["model.param_dtype=float32", "model.compute_dtype=float32", "eval.max_batches=1"]
    words += ["data.sequence_len=512", "log.hardware_seconds=0", "run.compile_cache=false"]
    words += ["checkpoint.best_metric=null", "eval.patience=null", "log.profile_start=null"]
    if config.model.tokenizer:  # of a Hub model
        words += ["model.tokenizer=builtin"]
    if config.model.path:
        words += [
            f"model.path={world.family(config.model.path)}",
            "model.tokenizer=null",
            "model.chat_template=null",
        ]
    else:
        words += [f"model.architecture.{key}={value}" for key, value in SIZES.items()]
    builtin = all(d.path.startswith("builtin:") for d in config.data.datasets)
    pairs = "calculator_pairs" if kind in PAIRS else "calculator"
    if builtin:
        words += [f"data.datasets.0.options.num_rows={24}"]
    elif kind == "tree":
        words += [f'data.datasets=[{{path="{write_trials(world.folder)}"}}]']
    else:
        words += [f"data.datasets=[{CALCULATOR.format(pairs, 'train', 24)}]"]
    judged = any(reward.function == "math" for reward in config.rewards)
    if kind == "rl" and judged:
        words += [f'data.datasets=[{{path="{write_problems(world.folder)}"}}]']
    if config.data.eval_datasets:
        words += [f"data.eval_datasets=[{CALCULATOR.format(pairs, 'test', 4)}]"]
    words += ["data.validation_split=null"]
    if config.eval.sets:
        own = "" if "env" in config.model_fields_set else ',env={kind="calculator"}'
        words += [f"eval.sets=[{EVALUATION.format(own)}]"]
        if judged:
            words += [f'eval.sets=[{{path="{write_problems(world.folder)}"}}]']
    if config.env.kind == "nemo_gym":  # a Gym takes minutes to start
        words += ['env={kind="calculator"}']
    if kind in ("rl", "ebft", "distillation"):
        words += ["rollout.prompts_per_step=2", "rollout.max_batch=8", "rollout.devices=null"]
        words += [f"rollout.group_size={1 if kind == 'distillation' else 2}"]
        words += ["rollout.zero_advantage=keep"] * (kind == "rl")  # answers earn all the same
    if config.rollout.engine == "vllm":
        words += [f'rollout.vllm.servers=["{world.server}"]', "rollout.vllm.launch=null"]
    if config.rollout.draft:
        words += [f"rollout.draft={world.draft}"]
    if getattr(getattr(task, "teacher", None), "path", None):
        words += [f"task.teacher.path={world.base}"]
    if hasattr(task, "units_per_step"):
        words += ["task.units_per_step=2"]
    if kind in ("dflash", "eagle3"):
        words += ["task.draft.target_layers=[0]", "task.draft.path=null"]
        words += ["task.draft_vocab_size=128"] * (kind == "eagle3")
        words += ["task.draft.num_layers=1"] * (kind == "dflash")
        words += ["task.draft.mask_token_id=500"] * (kind == "dflash")
    return words


def write_trials(folder: Path) -> Path:
    """Write rows for trees: two trials of each task, with thoughts."""
    path = folder / "trials.jsonl"
    with path.open("w") as file:
        for number in range(24):
            messages = []
            for turn in range(2):
                messages += [{"role": "user", "content": f"{number // 2} + {turn}?"}]
                answer = {"role": "assistant", "content": str(number // 2 + turn)}
                messages += [answer | {"reasoning_content": f"Trial {number}, {turn}."}]
            row = {"task_id": number // 2, "messages": messages, "token_usage": USAGE}
            file.write(json.dumps(row) + "\n")
    return path


def write_problems(folder: Path) -> Path:
    """Write rows with a question and its answer."""
    path = folder / "problems.jsonl"
    rows = [{"prompt": f"1 + {number}?", "answer": str(1 + number)} for number in range(4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def list_cells(train: Sequence[object], world: World, run: Path) -> dict[str, list[object]]:
    """Return the command line of each verb on a run that `train` trained; in this order."""
    small = ["sampling.max_new_tokens=4"]
    rows = world.folder / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "1 + 1?", "chosen": "2", "rejected": "3"}) + "\n")
    sweep = world.folder / "sweep.toml"
    overrides = ", ".join(map(json.dumps, train[3:]))
    sweep.write_text(
        f'[sweep]\nconfig = "{train[1]}"\noutput_dir = "{run}-sweep"\noverrides = [{overrides}]\n'
        '[grid]\n"run.seed" = [1]\n'
    )
    out = run.with_name(f"{run.name}-out")
    return {
        "generate": ["generate", run, "--prompt", "1 + 1?", *small],
        "generate --env": ["generate", run, "--env", "--prompt", "1 + 1?", *small],
        "eval": ["eval", run],
        "export": ["export", run],
        "export --step": ["export", run, "--step", 1, "--output", out / "step"],
        "merge": ["merge", run],
        "quantize": ["quantize", run, "--scheme", "int8"],
        "score": ["score", run, rows, "--output", out / "scores.jsonl"],
        "speculate": [
            *("speculate", run, "--draft", world.draft, "--input", "builtin:calculator"),
            *("--most", 1, *small),
        ],
        "plot": ["plot", run],
        "report": ["report", run],
        "watch --once": ["watch", run, "--once"],
        "resume": train,
        "resume with more steps": [*train, "run.max_steps=4"],
        "overwrite": [*train, "run.overwrite=true"],
        "sweep": ["sweep", sweep, "--print"],
    }


def fill_row(
    name: str, world: World, *more: str, verbs: Collection[str] | None = None
) -> dict[str, str]:
    """Train a config, with `more` overrides, and run every verb on it, or these alone; return
    {verb: what came of it}."""
    run = world.folder / name.replace("/", "_")
    for old in (run, run.with_name(f"{run.name}-out")):
        shutil.rmtree(old, ignore_errors=True)
    train = ["--config", name, f"run.output_dir={run}", *shrink(name, world), *more]
    row = {"train": world.call(*train)}
    if row["train"] == "ok":
        for verb, words in list_cells(train, world, run).items():
            if verbs is None or verb in verbs:
                row[verb] = world.call(*words)
    return row


def fill_table(folder: Path, names: Sequence[str]) -> None:
    """Append a line for each config to FOLDER/table.jsonl."""
    world = make_world(folder, list(FAMILIES))
    for name in names:
        begun, row = time.monotonic(), fill_row(name, world)
        with (folder / "table.jsonl").open("a") as file:
            file.write(json.dumps({"config": name, **row}) + "\n")
        print(f"{name}: {time.monotonic() - begun:.0f} s", flush=True)
        for column, cell in row.items():
            print(f"    {column:<24} {cell}", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    fill_table(Path(sys.argv[1]), sys.argv[2:] or list(list_recipes()))
