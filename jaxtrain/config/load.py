"""Load a Config from a file and the command line, with errors that a person can act on."""

import difflib
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from jaxtrain import plugins
from jaxtrain.config.base import members, section_type
from jaxtrain.config.overrides import change_table, lay_presets
from jaxtrain.config.parse import read_table
from jaxtrain.config.root import OUTSIDE, TASKS, Config, find_tag
from jaxtrain.config.secrets import hides
from jaxtrain.config.task import TaskSection
from jaxtrain.errors import UserError
from jaxtrain.text_safety import escape_control_chars, shorten, show

S = TypeVar("S", bound=BaseModel)

MEMBER = re.compile(r"(function-\w+|list|dict|set|tuple|nullable|union|literal)\[.*\]|str|outside")
"""Name that pydantic gives a type of a key with several."""
TABLE_ERRORS = ("model_type", "is_instance_of", "dict_type")
"""Kinds of pydantic's errors for what is no section."""

KNOWN_ELSEWHERE = {
    "lr": "optim.learning_rate",
    "scheduler": "optim.lr_scheduler",
    "batch_size": "data.global_batch_size or data.micro_batch_size",
    "epochs": "run.num_epochs",
    "problems": '[[eval.sets]] with path = "builtin:calculator", options.num_rows = the number and'
    ' env.kind = "calculator"',
    "r": "adapter.rank",
    "lora_rank": "adapter.rank",
    "target_modules": "adapter.target",
    "lora_target": "adapter.target",
    "lora_target_linear": 'adapter.target = "all-linear"',
    "modules_to_save": "adapter.train_embeddings and adapter.train_head",
    "adapter_name_or_path": "adapter.path",
    "rank": "adapter.rank",
    "dropout": "adapter.dropout",
    "peft_config": "section adapter",
    "lora_plus": "optim.lora_plus_ratio",
    "lora_bias": "nothing: adapters have no biases",
    "init_lora_weights": "nothing: A starts as in PEFT, B at 0",
    **dict.fromkeys(
        ("validation_fraction", "val_fraction", "eval_split", "test_size", "validation_size"),
        "data.validation_split",
    ),
    **{f"{name}_token": f"model.special_tokens.{name}_token" for name in ("bos", "eos", "pad")},
    "max_model_len": "data.sequence_len; of servers, rollout.vllm.args",
    **dict.fromkeys(
        ("xformers", "unsloth", "use_flash_attention_2"),
        "not needed: the kernel follows from model, data and device",
    ),
}
"""What users of other systems, or of older versions, may call a key; those of Axolotl, TRL and
prime-rl are in `convert`."""

KINDS_ELSEWHERE = {
    "dpo": 'task.kind = "preference" with task.loss = "sigmoid"',
    **{
        name: f'task.kind = "preference" with task.loss = "{name}"'
        for name in ("ipo", "kto", "orpo", "cpo", "simpo", "alphapo")
    },
    "bco": 'task.kind = "preference" with task.loss = "bco_pair"',
    "rpo": 'task.kind = "preference" with task.loss = "sigmoid" and task.cpo_alpha above 0',
    **{
        name: f'task.kind = "rl" with task.objective = "{name}"'
        for name in ("grpo", "dapo", "gspo", "rloo")
    },
    "gkd": 'task.kind = "distillation"',
    "kd": 'task.kind = "distillation"',
    "reward": 'task.kind = "reward_model"',
    "prm": 'task.kind = "reward_model" with task.labels = "steps"',
}
"""The methods that users of other systems look for by these kinds."""

REMOVED = ("eval.problems",)
"""Keys in the saved configs of older runs that shape nothing that a run has trained."""

MAX_PROBLEMS = 8
"""That one message names."""


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML, YAML or JSON file, or a config that comes with jaxtrain, by its name; apply
    `section.key=value` overrides and validate.

    Raises UserError with one line per problem.
    """
    from jaxtrain.config.bundled import find_config

    path = find_config(path)
    if path.name == "config.json" and (path.parent / "attempts.jsonl").is_file():
        table = read_saved(path)  # of a run, whose folder it is in now
    else:
        table = lay_presets(read_table(path), list(Config.model_fields))
    return validate_config(apply_overrides(table, overrides), str(path))


def apply_overrides(table: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Set `a.b.0.c=value` in nested dicts and lists; `section=name` lays a preset over one."""
    return change_table(table, overrides, list(Config.model_fields), takes_null)


def takes_null(parts: Sequence[str]) -> bool:
    """Return whether a key of these parts may be null; True for one that is not known, whose error
    names it."""
    sections: list[Any] = [Config]
    for index, part in enumerate(parts):
        fields = [entry.model_fields[part] for entry in sections if part in entry.model_fields]
        if not fields:
            # A position in a list or a name in a table: the sections below are still the same.
            if part.isdigit() and index + 1 < len(parts):
                continue
            return True
        annotations = [field.annotation for field in fields]
        if index + 1 == len(parts):
            return any(type(None) in get_args(annotation) for annotation in annotations)
        sections = [section for annotation in annotations for section in members(annotation)]
    return True


def read_saved(path: str | Path) -> dict[str, Any]:
    """The config.json of a run, less what older versions wrote and nobody reads any more; its
    output_dir is where the file is, and run.overwrite, which was done at the start, is false.

    Raises UserError where it is missing, broken or no table.
    """
    path = Path(path)
    table = read_table(path)
    for section, key in (name.split(".") for name in REMOVED):
        if isinstance(table.get(section), dict):
            table[section].pop(key, None)
    rollout = table.get("rollout")
    if isinstance(rollout, dict) and not rollout.get("replay_size"):
        # Older versions took them without replay, where they change nothing.
        for key in ("replay_logp", "replay_max_lag"):
            rollout.pop(key, None)
    sets = table["eval"].get("sets") if isinstance(table.get("eval"), dict) else None
    for eval_set in sets if isinstance(sets, list) else ():
        # Older versions wrote the default that a benchmark does not read.
        if isinstance(eval_set, dict) and eval_set.get("benchmark"):
            eval_set.pop("split", None)
    if isinstance(table.get("run"), dict):
        table["run"] |= {"output_dir": str(path.parent), "overwrite": False}
    return table


def validate_config(table: dict[str, Any], origin: str) -> Config:
    """Build the Config; `origin` names where the table came from in errors."""
    task = table.get("task")
    if isinstance(task, dict) and find_tag(task) == OUTSIDE:
        key = f"{origin}:\n  task.kind"
        if not isinstance(task["kind"], str):
            raise UserError(f"{key}: must be a text, found {show(task['kind'])}")
        outside = {entry.name for entry in plugins.list_entry_points("tasks")}
        instead = KINDS_ELSEWHERE.get(task["kind"].lower())
        if instead and task["kind"] not in outside:
            raise UserError(f"{key}: {show(task['kind'])} is {instead} here")
        method = plugins.find("tasks", task["kind"], TASKS, key=key, modules=True)
        section = getattr(method, "Section", None)
        if not (isinstance(section, type) and issubclass(section, TaskSection)):
            raise UserError(f"{key} {show(task['kind'])} has no class Section, a TaskSection")
        try:
            task_section = validate(section, task, origin, "task.")
        except UserError:
            raise
        except Exception as error:  # the border: validators of foreign code
            raise UserError(f"{key} {show(task['kind'])}: {plugins.describe(error)}") from error
        table = {**table, "task": task_section}
    return validate(Config, table, origin)


def validate(section: type[S], table: dict[str, Any], origin: str, prefix: str = "") -> S:
    """Build the section of a table; UserError with one line per problem, keys behind `prefix`."""
    try:
        return section.model_validate(table)
    except ValidationError as error:
        details = error.errors(include_url=False)
        # Of a key with several types, the message of the type that was meant.
        meant = {read_location(d) for d in details if d["type"] == "value_error"}
        details = [
            d for d in details if d["type"] == "value_error" or read_location(d) not in meant
        ]
        lines = [
            prefix + line for detail in details[:99] for line in describe_error(detail, section)
        ]
        count = max(len(details), len(lines))
        shown = lines[:MAX_PROBLEMS]
        if count > len(shown):
            shown.append(f"... and {count - len(shown)} more")
        listed = "\n".join(f"  {shorten(escape_control_chars(line), 400)}" for line in shown)
        raise UserError(f"{origin}:\n{listed}") from None


def read_location(detail: Any) -> tuple[Any, ...]:
    """Return the keys and positions of a pydantic error, without names of a union's members."""
    return tuple(part for part in detail["loc"] if not MEMBER.fullmatch(str(part)))


def describe_error(detail: Any, root: type[BaseModel] = Config) -> list[str]:
    """Lines for one pydantic error: key, what was found, what is allowed."""
    location = list(read_location(detail))
    key = ".".join(shorten(str(part), 100) for part in location if not is_tag(location, part))
    kind = detail["type"]
    if kind == "extra_forbidden":
        return [f"{key}: {suggest(str(location[-1]), section_keys(location[:-1], root), key)}"]
    if kind == "missing":
        return [f"{key}: is required"]
    if kind == "value_error":
        error = detail["ctx"]["error"]
        prefix = f"{key}: " if key else ""
        return [prefix + line for line in getattr(error, "lines", [str(error)])]
    message = detail["msg"][0].lower() + detail["msg"][1:]
    message = "must be a table" if kind in TABLE_ERRORS else message
    input_text = "a value that is not shown" if hides(location) else show(detail["input"])
    return [f"{key}: {message}, found {input_text}"]


def suggest(key: str, allowed: list[str], path: str = "") -> str:
    """Name the nearest allowed key, the section that has this one, or all that are allowed. path:
    of the key, where it is not that of another section."""
    # Looking for what is near takes the product of the lengths.
    near = difflib.get_close_matches(key, allowed, n=1, cutoff=0.6) if len(key) < 64 else []
    from jaxtrain.convert import find_hint

    counterpart = KNOWN_ELSEWHERE.get(key) or find_hint(key)
    # What has the same name in another section is less likely meant than what is near in this one.
    if near and (counterpart is None or counterpart.endswith(f".{key}")):
        return f"unknown key {show(key)}; did you mean {near[0]!r}?"
    elsewhere = counterpart or next(
        (
            f"{name}.{key}"
            for name, field in Config.model_fields.items()
            if key in getattr(section_type(field.annotation), "model_fields", ())
        ),
        None,
    )
    if elsewhere and elsewhere == path:
        return f"unknown key {show(key)}; a section of another kind has it"
    if elsewhere:
        return f"unknown key {show(key)}; here it is {elsewhere}"
    return f"unknown key {show(key)}; allowed here: {', '.join(allowed)}"


def section_keys(location: list[Any], root: type[BaseModel] = Config) -> list[str]:
    """Return the keys that the section at `location` below `root` allows."""
    model: Any = root
    union: Any = None
    for part in location:
        if isinstance(part, str) and part in model.model_fields:
            union = model.model_fields[part].annotation
            model = section_type(union) or model
        else:
            model = next((m for m in members(union) if kind_of(m) == part), model)
    return list(model.model_fields)


def kind_of(section: Any) -> str | None:
    """The `kind` by which a union of sections knows this one."""
    fields = getattr(section, "model_fields", {})
    return fields["kind"].default if "kind" in fields else None


def is_tag(location: list[Any], part: Any) -> bool:
    """Return whether a part of an error's location is a kind of a union `task`, not a key."""
    behind = (after for before, after in pairwise(location) if before == "task")
    return any(after is part for after in behind) and part in TASKS
