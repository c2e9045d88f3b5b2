"""The tables of docs/support.md: which methods go with what, asked of the code that refuses.

python scripts/make_support_table.py          # writes them
python scripts/make_support_table.py --check  # says whether they are up to date

Each cell is a config for a small model of random weights, read and made into a task on four
pretended devices, as a run does before it opens data or weights. Nothing is trained.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]
PAGE, BEGIN, END = ROOT / "docs" / "support.md", "<!-- support -->", "<!-- end -->"

COMMON = (
    "model=tiny run.max_steps=10 data.sequence_len=128 sampling.temperature=1.0"
    " sampling.max_new_tokens=16 parallel.fsdp=-1 data.datasets.0.path=builtin:calculator"
)
PAIRS = "data.datasets.0.path=builtin:calculator_pairs"
METHODS = {
    "sft": "",
    "tree": "",
    "preference": PAIRS,
    "reward_model": PAIRS,
    "rl": "env.kind=calculator",
    "ebft": "",
    "ebft_strided": "",
    "distillation": "task.teacher.path=TEACHER",
    "dflash": "task.draft.target_layers=[0,1,2,3] model.router_aux_loss_coef=0",
    "eagle3": "task.draft.target_layers=[0,2,3] model.router_aux_loss_coef=0",
    "diffusion": "model.architecture.vocab_size=640",  # rows to spare for the mask
}
"""task.kind: what its config needs to be whole."""
SERVERS = 'rollout.engine=vllm rollout.vllm.servers=["http://127.0.0.1:8000"]'
CHOICES = {
    "all weights": "",
    "LoRA": "adapter.kind=lora",
    "DoRA": "adapter.kind=dora",
    "QLoRA": "adapter=qlora",
    "Muon": "optim.name=muon",
    "accumulated gradients": "optim.gradient_accumulation_steps=4",
    "streamed data": "data.datasets.0.streaming=true",
    "`[[eval.sets]]`": "eval.sets.0.path=builtin:calculator eval.sets.0.env.kind=calculator",
}
DEVICES = {
    "tensor": "parallel.tensor=2",
    "context": "parallel.context=2",
    "expert": "model=tiny_moe parallel.expert=2",
    "experts (Qwen3-MoE)": "model=tiny_moe",
    "linear attention (Qwen3.5)": "model=tiny_hybrid",
}
SAMPLERS = {
    "local engine": "rollout.engine=local",
    "drawn ahead": "rollout.mode=async",
    "vLLM servers": SERVERS,
    "LoRA, vLLM servers": f"{SERVERS} adapter.kind=lora rollout.vllm.sync=lora"
    " rollout.vllm.adapter_dir=adapters",
}
DRAW = {"distillation": "task.on_policy_share=0.5"}
"""What makes a method draw answers that does not always."""


def ask(kind: str, extra: str, teacher: Path) -> str | None:
    """Why the method does not go with that; None where it does."""
    from jaxtrain.config import Config
    from jaxtrain.config.load import validate_config
    from jaxtrain.config.overrides import change_table
    from jaxtrain.errors import UserError
    from jaxtrain.methods.registry import make_task

    # Presets first: what a method sets of section model stands over them.
    words = sorted(f"{COMMON} {extra} {METHODS[kind]}".split(), key=lambda word: "." in word)
    words = [word.replace("TEACHER", str(teacher)) for word in words]
    table: dict[str, Any] = {"task": {"kind": kind}}
    try:
        make_task(validate_config(change_table(table, words, list(Config.model_fields)), kind))
    except UserError as error:
        line = str(error).removeprefix(f"{kind}:").strip().splitlines()[0]
        return line.strip().replace(f"task.kind {kind} ", "it ").replace("|", "\\|")
    return None


def make_table(
    head: str, kinds: list[str], columns: dict[str, str], notes: list[str], teacher: Path
) -> list[str]:
    """Lines of a table; why a cell is "no" goes into notes, where it is found again."""
    lines = ["| " + " | ".join([head, *columns]) + " |", "|---" * (len(columns) + 1) + "|"]
    for kind in kinds:
        cells = [f"`{kind}`"]
        for extra in columns.values():
            drawing = DRAW.get(kind, "") if columns is SAMPLERS else ""
            why = ask(kind, f"{extra} {drawing}", teacher)
            if why is not None and why not in notes:
                notes.append(why)
            cells.append("yes" if why is None else f"no ({notes.index(why) + 1})")
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def render() -> str:
    """The part between the marks."""
    from jaxtrain.config.root import TASKS

    notes: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        teacher = write_teacher(Path(folder))
        drawing = [kind for kind in METHODS if "rollout" in TASKS[kind].reads]
        assert set(METHODS) == set(TASKS), "a method without a row"
        lines = [BEGIN, *make_table("method", list(METHODS), CHOICES, notes, teacher), ""]
        lines += [*make_table("devices, layers", list(METHODS), DEVICES, notes, teacher), ""]
        lines += [*make_table("sampler", drawing, SAMPLERS, notes, teacher), ""]
    return "\n".join([*lines, *(f"{n}. {why}" for n, why in enumerate(notes, 1)), END])


def write_teacher(folder: Path) -> Path:
    """A folder with a small model's config and tokenizer: nobody reads its weights here."""
    from jaxtrain.config.overrides import load_preset

    config = load_preset("model", "tiny", ["model"])["architecture"]
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copytree(ROOT / "jaxtrain/assets/tokenizer", folder, dirs_exist_ok=True)
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; 1 where it is old")
    check = parser.parse_args().check
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
    os.environ["JAX_PLATFORMS"] = "cpu"
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    new = before + render() + rest.split(END)[1]
    if check:
        return int(new != text)
    PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
