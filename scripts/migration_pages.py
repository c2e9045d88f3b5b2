"""The pages docs/from_*.md: keys of other systems beside ours, from the tables of `convert`."""

import contextlib
import io
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

HEAD = """\
# From {name}: every key

`jaxtrain convert {file}` writes a config of these keys here; [the page for all](coming_from.md)
says what to know about it. This page is written from the converter's own tables.

## One config, side by side

```{language}
{theirs}
```

becomes, by `jaxtrain convert {file}`:

```text
{ours}
```
"""
EXAMPLES = {
    "axolotl": (
        "Axolotl",
        "config.yml",
        "yaml",
        """\
base_model: Qwen/Qwen3-0.6B
adapter: lora
lora_r: 16
lora_alpha: 32
lora_dropout: 0.05
lora_target_linear: true
loraplus_lr_ratio: 16
chat_template: chatml
datasets:
  - path: chats.jsonl
    type: chat_template
val_set_size: 0.05
sequence_len: 2048
sample_packing: true
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 3
learning_rate: 0.0002
evals_per_epoch: 4
saves_per_epoch: 1
flash_attention: true""",
    ),
    "llama-factory": (
        "LLaMA-Factory",
        "train.yaml",
        "yaml",
        """\
model_name_or_path: Qwen/Qwen3-0.6B
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 16
lora_target: all
dataset: /data/chats.jsonl
template: qwen3
cutoff_len: 2048
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
val_size: 0.05
eval_strategy: steps
eval_steps: 500
flash_attn: fa2""",
    ),
    "trl": (
        "TRL",
        "train.sh",
        "sh",
        """\
trl sft --model_name_or_path Qwen/Qwen3-0.6B --dataset_name trl-lib/Capybara \\
  --per_device_train_batch_size 2 --max_length 2048 --packing \\
  --use_peft --lora_r 16 --lora_dropout 0.05 --neftune_noise_alpha 5""",
    ),
    "prime-rl": (
        "prime-rl",
        "sft.toml",
        "text",
        """\
max_steps = 100

[model]
name = "Qwen/Qwen3-0.6B"

[model.lora]
rank = 16
dropout = 0.05

[data]
name = "chats.jsonl"
seq_len = 2048
batch_size = 32

[optim]
lr = 2e-4""",
    ),
}
"""(what people call it, a file's name, its language, its text) by system."""


def render_migration() -> dict[str, str]:
    """{name in docs/: text}."""
    from jaxtrain.cli.convert import convert
    from jaxtrain.convert import SYSTEMS

    pages = {}
    for system, (name, file, language, example) in EXAMPLES.items():
        with tempfile.TemporaryDirectory() as folder:
            path, output = Path(folder) / file, io.StringIO()
            path.write_text(example + "\n")
            with contextlib.redirect_stdout(output):
                assert convert([path], system, None) == 0, output.getvalue()
        converted = output.getvalue().strip()
        head = HEAD.format(name=name, file=file, language=language, theirs=example, ours=converted)
        body = "\n".join(write_tables(SYSTEMS[system].RULES))
        pages[f"from_{system.replace('-', '_')}.md"] = f"{head}\n{body}\n"
    return pages


def write_tables(rules: Mapping) -> Iterator[str]:
    """Lines of three tables: keys that are something here, those not needed, those with nothing."""
    rules_by_key = dict(walk(rules))
    groups: dict[str, list[tuple[str, str]]] = {"here": [], "not needed": [], "nothing": []}
    for key, rule in rules_by_key.items():
        kind = next((kind for kind in groups if rule.hint.startswith(f"{kind}: ")), "here")
        counterpart = rule.hint.removeprefix(f"{kind}: ")
        if rule.key and counterpart.startswith(rule.key):
            counterpart = f"`{rule.key}`{counterpart.removeprefix(rule.key)}"
        groups[kind].append((f"`{key}`", counterpart.replace("|", r"\|").replace("<", "&lt;")))
    titles = ("Keys and what they are here", "Keys that are not needed", "Keys without counterpart")
    heads = (("there", "here"), ("there", "because"), ("there", "instead"))
    for title, (first, right), rows in zip(titles, heads, groups.values(), strict=True):
        yield from ("", f"## {title}", "", f"| {first} | {right} |", "|---|---|")
        yield from (f"| {key} | {counterpart} |" for key, counterpart in rows)


def walk(rules: Mapping, prefix: str = "") -> Iterator[tuple[str, object]]:
    """(dotted key, rule) of a table and the tables within it."""
    for key, rule in rules.items():
        if rule.inner is None:
            yield f"{prefix}{key}", rule
        else:
            yield from walk(rule.inner, f"{prefix}{key}.")
