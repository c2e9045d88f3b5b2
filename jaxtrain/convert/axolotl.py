"""Axolotl's YAML."""

import re
from collections.abc import Mapping
from functools import partial
from typing import Any, cast

from jaxtrain.convert import shared
from jaxtrain.convert.conversion import Conversion, ConversionRule, load_rules
from jaxtrain.convert.nemo_gym import PLUGIN, finish_gym
from jaxtrain.convert.shared import (
    TRAINER,
    finish,
    finish_round,
    finish_sampling,
    listed,
    load_4bit,
    train_vision,
)
from jaxtrain.convert.trl import GRPO, set_servers, set_task

DEFAULTS = {
    "sequence_len": 512,
    "lr_scheduler": "cosine",
    "sample_packing": False,
    "warmup_ratio": 0.03,
    "num_epochs": 1.0,
}
"""What Axolotl takes where a file says nothing, and this project would take something else."""

FORMATS = {name: name for name in ("alpaca", "completion", "input_output")}
FORMATS |= {"chat_template": "chat", "sharegpt": "chat", "pretrain": "completion"}
TEMPLATES = {
    **{name: name for name in ("chatml", "llama3", "gemma", "alpaca")},
    **{name: name for name in ("mistral_v1", "mistral_v3_tekken", "mistral_v7_tekken")},
    **{"gemma3": "gemma", "mistral_v2v3": "mistral", "phi_3": "phi3", "phi_35": "phi3"},
    "phi_4": "phi4",
}
"""Theirs and ours, of those that write the same turns."""
TEMPLATE_NOTES = {
    "alpaca": "without a system message it begins with Stanford Alpaca's sentence here",
    "phi_3": "no bos token is written here, as in Phi-3's newer tokenizers",
    "phi_4": "theirs is Phi-4-reasoning's, with a long system message: put it into the data",
    "mistral_v7_tekken": "no system message is written where the data have none",
}
"""What differs for some data."""
TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "additional_special_tokens")
BUILT_IN = ("liger", "cut_cross_entropy", "diffusion", "kernels", "expert_parallel", PLUGIN)
"""Parts of the names of plugins that are built in here."""


def detect(table: Mapping[str, Any]) -> bool:
    """Return whether a table looks like this system's."""
    return "base_model" in table


def convert(table: Mapping[str, Any]) -> Conversion:
    """Their config in ours."""
    conversion = Conversion(table)
    conversion.run({"rl": RULES["rl"]}, {"rl": table.get("rl")})
    defaults = dict(DEFAULTS)
    if table.get("pretraining_dataset"):
        del defaults["sample_packing"]  # texts are concatenated
    if table.get("warmup_steps") is not None:
        del defaults["warmup_ratio"]
    conversion.run(RULES, {**defaults, **table})
    conversion.attempt(_finish_task, finish, finish_gym, _set_vision)
    return conversion


def _finish_task(conversion: Conversion) -> None:
    """Apply what follows from several keys of Axolotl's."""
    table = conversion.source
    if conversion.get("task.labels") == "steps":
        conversion.set("task.kind", "reward_model")
    if table.get("gradient_accumulation_steps") and conversion.remove("data.global_batch_size"):
        conversion.drop("gradient_accumulation_steps outweighs it", "batch_size")
    if isinstance(table.get("diffusion"), Mapping):
        conversion.set("task.kind", "diffusion")
    if table.get("train_on_inputs"):
        for dataset in conversion.get("data.datasets") or []:
            dataset.setdefault("train_on", "all")
    if conversion.get("task.kind") in ("rl", "ebft"):
        settings = {**(table.get("vllm") or {}), **(table.get("trl") or {})}
        set_servers(conversion, settings)
        conversion.remove("data.packing")
        finish_round(conversion, conversion.remove("data.micro_batch_size"))
        finish_sampling(conversion)
        if conversion.get("rollout.replay_logp") and not conversion.get("rollout.replay_size"):
            conversion.remove("rollout.replay_logp")
            conversion.drop("no group is replayed", "trl.replay_recompute_logps")


def _set_vision(conversion: Conversion) -> None:
    """Train the parts for images as well, unless they are frozen."""
    source = conversion.source
    chosen = isinstance(source.get("lora_target_modules"), str)  # by whole names
    if conversion.images and not chosen and not source.get("freeze_mm_modules"):
        train_vision(conversion, "tower", "projector")


def _processor(conversion: Conversion, value: Any) -> None:
    conversion.images = "processor_type" if value else None


def _rl(conversion: Conversion, value: Any) -> None:
    if value in ("grpo", "gdpo"):
        conversion.set("task.kind", "rl")
        conversion.set("task.objective", value)
        conversion.set("sampling.temperature", 1.0)
    elif value == "ebft":
        strided = (conversion.source.get("ebft") or {}).get("mode") == "strided"
        conversion.set("task.kind", "ebft_strided" if strided else "ebft")
        conversion.set("sampling.temperature", None if strided else 1.0)
    elif value in ("dpo", "kto", "orpo", "cpo"):
        set_task(conversion, value, conversion.source.get("dpo_loss_type"))
        conversion.set("task.loss_weights", conversion.source.get("dpo_loss_weights"))
    elif value in ("ipo", "simpo"):
        set_task(conversion, "dpo", value)
    elif value:
        conversion.set("task.kind", value)
        conversion.miss("see docs/reference/config.md for the tasks")


def _adapter(conversion: Conversion, value: Any) -> None:
    if value in ("lora", "qlora") and conversion.get("adapter.kind") is None:
        conversion.set("adapter.kind", "lora")
    if value == "qlora":
        load_4bit(conversion, True)
    if value not in ("lora", "qlora", None, ""):
        conversion.miss("adapter.kind is lora or dora")


def _hold_out(conversion: Conversion, value: Any) -> None:
    """Their number of rows is of all datasets together."""
    if value and conversion.source.get("test_datasets"):
        conversion.drop("test_datasets is what is held out")
        return
    conversion.set("data.validation_split", value or None)
    if value and value >= 1 and len(conversion.source.get("datasets") or []) > 1:
        conversion.log(
            "here it is so many rows of each dataset; give each its own number with held_out, or a"
            " share below 1, which is of all of them"
        )


def _template(conversion: Conversion, value: Any) -> None:
    if value in (None, "jinja", ""):
        return
    if value in TEMPLATES:
        conversion.set("model.chat_template", TEMPLATES[value])
        if value in TEMPLATE_NOTES:
            conversion.log(TEMPLATE_NOTES[value])
    elif str(value).startswith("tokenizer_default"):
        conversion.log("the tokenizer's own template is used; without one there is an error")
    else:
        conversion.miss(
            "the tokenizer's own template is used; another is a name or file in model.chat_template"
        )


def _special(conversion: Conversion, value: Any) -> None:
    for name, token in (value or {}).items():
        if name in TOKENS:
            conversion.set(f"model.special_tokens.{name}", token)
        elif token:
            conversion.miss(f"{name}: model.special_tokens has {', '.join(TOKENS)}")


def _tokens(conversion: Conversion, value: Any) -> None:
    """A list of new tokens; in old files a table of special ones."""
    if isinstance(value, Mapping):
        _special(conversion, value)
    else:
        conversion.set("model.added_tokens", value)


def _plugins(conversion: Conversion, value: Any) -> None:
    for name in listed(value):
        if not any(part in str(name).lower() for part in BUILT_IN):
            conversion.miss(f"{name}: docs/reference/config.md has what is built in")


def _unfrozen(conversion: Conversion, value: Any) -> None:
    """Their patterns are matched from the beginning of a name."""
    patterns = [str(pattern) for pattern in listed(value)]
    anchored = [p if p.startswith("^") else f"^{p}" for p in patterns]
    conversion.set("optim.unfrozen_parameters", anchored or None)


def _lr_groups(conversion: Conversion, value: Any) -> None:
    """Their modules are parts of names; the first group that fits counts."""
    groups = [
        {
            "pattern": "|".join(map(re.escape, listed(group["modules"]))),
            "learning_rate": group["lr"],
        }
        for group in listed(value)
    ]
    conversion.set("optim.lr_groups", groups[::-1] or None)


def _read_datasets(key: str, conversion: Conversion, value: Any) -> None:
    datasets = []
    for entry in listed(value):
        if isinstance(entry, Mapping):
            streams = {"streaming": True} if conversion.source.get("streaming") else {}
            datasets.append(_read_dataset(conversion, {**streams, **entry}))
        else:
            conversion.miss("a dataset is a table with a path")
    conversion.set(key, [dataset for dataset in datasets if dataset])


def _read_dataset(conversion: Conversion, source: Mapping[str, Any]) -> dict[str, Any]:
    """Convert one entry; keys without a counterpart are noted with the others."""
    path, files = source.get("path"), source.get("data_files")
    loads_files = path in ("json", "csv", "parquet", "arrow", "text", None)
    further_paths = listed(files) if files else []
    if further_paths and loads_files:
        path, *further_paths = further_paths
    for further_path in further_paths:
        why = "a dataset here is one file or one folder"
        conversion.missed.append(("datasets.data_files", further_path, why))
    dataset = Conversion(source, {"path": path})
    kind = source.get("type")
    named = {**source, **(kind if isinstance(kind, Mapping) else {})}
    fields: dict[str, Any] = {}
    for name, target in FIELDS.items():
        column = named.get(name)
        if isinstance(column, Mapping):
            fields |= {f"{target}.{key}": source_key for key, source_key in column.items()}
        elif column not in (None, "", target, target.rpartition(".")[2]):
            fields[target] = column
    rest = {key: value for key, value in source.items() if key not in FIELDS}
    if skip := rest.pop("skip", None):
        rest["split"] = f"{rest.get('split') or 'train'}[{skip}:]"
    dataset.run(DATASET, rest, prefix="datasets.")
    dataset.set("fields", fields or None)
    _as_prompts(dataset, kind)
    roles = source.get("roles") or {}
    dataset.set("roles", {old: new for new, olds in roles.items() for old in listed(olds)} or None)
    if "message_field_training" in source:
        dataset.set("train_on", "per_message")
    for key, setting in (dataset.remove("task") or {}).items():
        conversion.set(f"task.{key}", setting)
    conversion.missed += dataset.missed
    conversion.notes += dataset.notes
    for why, keys in dataset.dropped.items():
        conversion.dropped.setdefault(why, []).extend(keys)
    return dataset.table


PROMPTS = {"format": "{instruction} {input} ", "no_input_format": "{instruction} "}
"""How Axolotl writes prompts of a type that is a table, where the table does not say."""


ANSWERS = {
    "prompt": ("prompt_format", "{prompt}"),
    "chosen": ("chosen_format", "{chosen}"),
    "rejected": ("rejected_format", "{rejected}"),
    "completion": ("completion_format", "{completion}"),
}
"""Columns of preference data, with the keys of their formats and what says nothing."""
FORMAT_KEYS = {*PROMPTS, *(key for key, _ in ANSWERS.values()), "system_format", "system_prompt"}
"""Keys of formats, which only a type that is a table has."""


def _as_prompts(dataset: Conversion, kind: Any) -> None:
    """Read a type that is a table: preference data or instructions, written by formats."""
    if not isinstance(kind, Mapping):
        for key in sorted(dataset.source.keys() & FORMAT_KEYS):
            dataset.missed.append(
                (f"datasets.{key}", dataset.source[key], "read in a table `type`")
            )
        return
    dataset.run(DATASET, {k: v for k, v in kind.items() if k not in FIELDS}, "datasets.type.")
    formats: dict[str, Any] = {
        name: kind[key]
        for name, (key, plain) in ANSWERS.items()
        if kind.get(key) not in (None, "", plain)
    }
    if formats or any(key in kind for key in ("field_chosen", "field_completion")):
        dataset.remove("format")
        if "{system}" in formats.get("prompt", ""):
            formats["prompt"] = [formats["prompt"], formats["prompt"].replace("{system}", "")]
    else:
        dataset.set("format", "prompt_completion")
        fields = dataset.remove("fields") or {}
        fields["completion"] = fields.pop("output", "output")
        styles = [kind.get(key) or style for key, style in PROMPTS.items()]
        system = kind.get("system_format") or "{system}"
        heads = [system] if kind.get("field_system") else []
        fixed = str(kind.get("system_prompt") or "").replace("{", "{{").replace("}", "}}")
        heads.append(system.replace("{system}", fixed) if fixed else "")
        prompts = list(dict.fromkeys(head + style for head in heads for style in styles))
        if prompts == ["{instruction}"]:
            fields["prompt"] = fields.pop("instruction", "instruction")
        else:
            formats["prompt"] = prompts
        dataset.set("fields", fields)
    dataset.set("column_formats", formats or None)


def _format(conversion: Conversion, value: Any) -> None:
    if isinstance(value, Mapping):
        conversion.set("format", "alpaca")
        return
    name, style = str(value).split(".")[0], str(value).partition(":")[2]
    name = name.partition(":")[0]
    if name not in FORMATS:
        conversion.miss('format "auto" tells from the columns, or name a function of your own')
    elif "." not in str(value):  # others are pairs, which the data's columns tell
        conversion.set("format", FORMATS[name])
        if style and name != "sharegpt":
            conversion.miss(
                f"the format is {FORMATS[name]!r}, which writes no prompts as {style!r}"
            )


def _roles_to_train(conversion: Conversion, value: Any) -> None:
    names = {"human": "user", "gpt": "assistant", "model": "assistant"}
    roles = [names.get(role, role) for role in listed(value)]
    if roles != ["assistant"]:
        conversion.set("roles_to_train", list(dict.fromkeys(roles)) or None)


RULES = {**TRAINER, **load_rules("axolotl", {**vars(shared), **globals()})}
"""Every key that is known."""
TRL_RULES = cast(dict[str, ConversionRule], RULES["trl"].inner)
TRL_RULES.update({**GRPO, **TRL_RULES})  # in place, because the rule of `trl` applies this table
DATASET = RULES["datasets"].inner or {}
FIELDS = {
    name: rule.key.removeprefix("fields.")
    for name, rule in DATASET.items()
    if rule.key and rule.key.startswith("fields.")
}
"""Names of columns there and here."""
for _name in ("datasets", "pretraining_dataset", "test_datasets"):
    _key = "data.eval_datasets" if _name == "test_datasets" else "data.datasets"
    RULES[_name] = ConversionRule(_key, partial(_read_datasets, _key), inner=DATASET)
