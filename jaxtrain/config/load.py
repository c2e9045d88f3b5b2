"""From a file and the command line to a Config, with errors that a person can act on."""

import difflib
import json
import tomllib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError

from jaxtrain import plugins
from jaxtrain.config.root import OUTSIDE, TASKS, Config, find_tag
from jaxtrain.errors import UserError

S = TypeVar("S", bound=BaseModel)

KNOWN_ELSEWHERE = {
    "lr": "optim.learning_rate",
    "scheduler": "optim.lr_scheduler",
    "optimizer": "optim.name",
    "base_model": "model.path",
    "model_name_or_path": "model.path",
    "chat_template_jinja": "model.chat_template",
    "gradient_checkpointing": "model.remat",
    "bf16": "model.compute_dtype",
    "dtype": "model.compute_dtype",
    "max_length": "data.sequence_len",
    "max_seq_length": "data.sequence_len",
    "seq_len": "data.sequence_len",
    "sample_packing": "data.packing",
    "batch_size": "data.global_batch_size or data.micro_batch_size",
    "per_device_train_batch_size": "data.micro_batch_size",
    "train_on_inputs": 'train_on = "all" of a dataset',
    "val_set_size": "data.eval_datasets",
    "num_train_epochs": "run.num_epochs",
    "epochs": "run.num_epochs",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "eval_steps": "eval.every",
    "problems": '[[eval.sets]] with path = "builtin:calculator", options.num_rows = the number and'
    ' env.kind = "calculator"',
    "logging_steps": "log.every",
    "report_to": "log.tensorboard or log.wandb_project",
    "resume_from_checkpoint": "run.resume",
    "r": "adapter.rank",
    "lora_r": "adapter.rank",
    "lora_rank": "adapter.rank",
    "lora_alpha": "adapter.alpha",
    "use_rslora": "adapter.rslora",
    "peft_use_rslora": "adapter.rslora",
    "use_dora": 'adapter.kind = "dora"',
    "peft_use_dora": 'adapter.kind = "dora"',
    "use_peft": 'adapter.kind = "lora"',
    "target_modules": "adapter.target",
    "lora_target": "adapter.target",
    "lora_target_modules": "adapter.target",
    "lora_target_linear": 'adapter.target = "all-linear"',
    "modules_to_save": "adapter.train_embeddings and adapter.train_head",
    "lora_modules_to_save": "adapter.train_embeddings and adapter.train_head",
    "lora_model_dir": "adapter.path",
    "load_in_4bit": 'adapter.quantize = "nf4"',
    "load_in_8bit": 'adapter.quantize = "int8"',
    "adapter_name_or_path": "adapter.path",
}
"""What users of other systems, or of older versions, may call a key."""

REMOVED = ("eval.problems",)
"""Keys in the saved configs of older runs that shape nothing that a run has trained."""


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML (or YAML) file, apply `section.key=value` overrides and validate.

    Raises UserError with one line per problem.
    """
    return validate_config(apply_overrides(read_table(path), list(overrides)), str(path))


def read_saved(text: str) -> Any:
    """The JSON of a run's config, less what older versions wrote and nobody reads any more."""
    table = json.loads(text)
    for section, key in (name.split(".") for name in REMOVED):
        if isinstance(table, dict) and isinstance(table.get(section), dict):
            table[section].pop(key, None)
    return table


def validate_config(table: dict[str, Any], origin: str) -> Config:
    """Build the Config; `origin` names where the table came from in errors."""
    task = table.get("task")
    if isinstance(task, dict) and find_tag(task) == OUTSIDE:
        key = f"{origin}:\n  task.kind"
        method = plugins.find("tasks", str(task["kind"]), TASKS, key=key, modules=True)
        table = {**table, "task": validate(method.Section, task, origin, "task.")}
    return validate(Config, table, origin)


def validate(section: type[S], table: dict[str, Any], origin: str, prefix: str = "") -> S:
    """The section of a table; UserError with one line per problem, keys behind `prefix`."""
    try:
        return section.model_validate(table)
    except ValidationError as error:
        lines = [prefix + describe_error(detail, section) for detail in error.errors()]
        shown = lines[:8] + ([f"... and {len(lines) - 8} more"] if len(lines) > 8 else [])
        raise UserError(f"{origin}:\n" + "\n".join(f"  {line}" for line in shown)) from None


def read_table(path: str | Path) -> dict[str, Any]:
    """Parse a .toml, .yaml, .yml or .json file into nested dicts."""
    path = Path(path)
    if not path.is_file():
        near = sorted(str(p) for p in Path("configs").glob("**/*.toml"))
        hint = f"; the configs here are {', '.join(near)}" if near else ""
        raise UserError(f"config file {str(path)!r} does not exist{hint}")
    text = path.read_text()
    try:
        if path.suffix in (".yaml", ".yml"):
            table = yaml.safe_load(text) or {}
        elif path.suffix == ".json":
            table = json.loads(text)
        elif path.suffix == ".toml":
            table = tomllib.loads(text)
        else:
            raise UserError(f"config file {str(path)!r} must end in .toml, .yaml, .yml or .json")
    except (tomllib.TOMLDecodeError, yaml.YAMLError, json.JSONDecodeError) as error:
        raise UserError(f"{path} is not valid {path.suffix[1:].upper()}: {error}") from None
    if not isinstance(table, dict):
        raise UserError(f"{path} must hold sections, not a {type(table).__name__}")
    return {
        key: load_preset(key, value) if isinstance(value, str) else value
        for key, value in table.items()
    }


def apply_overrides(table: dict[str, Any], overrides: list[str]) -> dict[str, Any]:
    """Set `a.b.0.c=value` in nested dicts and lists; `section=name` takes a whole preset."""
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise UserError(f"override {override!r} is not of the form section.key=value")
        *parents, last = key.strip().split(".")
        if not parents:
            table[last] = load_preset(last, text)
            continue
        node: Any = table
        for part, below in zip(parents, [*parents[1:], last], strict=True):
            node = _child(node, part, override, empty=[] if below.isdigit() else {})
        if isinstance(node, list):
            node[_index(node, last, override)] = parse_value(text)
        else:
            node[last] = parse_value(text)
    return table


def parse_value(text: str) -> Any:
    """A TOML value where it parses as one ("1e-5", "true", "[1, 2]", "'quoted'"), else the text."""
    if text == "null":
        return None
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def load_preset(section: str, name: str) -> dict[str, Any]:
    """The shipped table `presets/<section>/<name>.toml`."""
    if section not in Config.model_fields:
        raise UserError(f"{section}={name}: {suggest(section, list(Config.model_fields))}")
    folder = resources.files("jaxtrain") / "presets" / section
    known = sorted(f.name[:-5] for f in folder.iterdir()) if folder.is_dir() else []
    if name not in known:
        allowed = f"known presets: {', '.join(known)}" if known else "this section has no presets"
        raise UserError(
            f"{section}={name}: no such preset; {allowed}; or set {section}.<key>=value"
        )
    return tomllib.loads((folder / f"{name}.toml").read_text())


def describe_error(detail: Any, root: type[BaseModel] = Config) -> str:
    """One line for one pydantic error: key, what was found, what is allowed."""
    location = list(detail["loc"])
    key = ".".join(str(part) for part in location if not is_tag(location, part))
    kind = detail["type"]
    if kind == "extra_forbidden":
        return f"{key}: {suggest(str(location[-1]), section_keys(location[:-1], root))}"
    if kind == "missing":
        return f"{key}: is required"
    if kind == "value_error":
        prefix = f"{key}: " if key else ""
        return prefix + str(detail["ctx"]["error"])
    message = detail["msg"][0].lower() + detail["msg"][1:]
    return f"{key}: {message}, found {detail['input']!r}"


def suggest(key: str, allowed: list[str]) -> str:
    """Name the nearest allowed key, the section that has this one, or all that are allowed."""
    near = difflib.get_close_matches(key, allowed, n=1, cutoff=0.6)
    if near and key not in KNOWN_ELSEWHERE:
        return f"unknown key {key!r}; did you mean {near[0]!r}?"
    elsewhere = KNOWN_ELSEWHERE.get(key) or next(
        (
            f"{name}.{key}"
            for name, field in Config.model_fields.items()
            if key in getattr(section_type(field.annotation), "model_fields", ())
        ),
        None,
    )
    if elsewhere:
        return f"unknown key {key!r}; here it is {elsewhere}"
    return f"unknown key {key!r}; allowed here: {', '.join(allowed)}"


def section_keys(location: list[Any], root: type[BaseModel] = Config) -> list[str]:
    """The keys that the section at `location` below `root` allows."""
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
    """Whether a part of an error's location is a kind of the union task, not a key."""
    return location[0] == "task" and len(location) > 1 and location[1] is part and part != "kind"


def members(annotation: Any) -> list[type[BaseModel]]:
    """The Sections inside an annotation such as `list[DatasetConfig]`, `X | None` or a union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for arg in get_args(annotation) for model in members(arg)]


def section_type(annotation: Any) -> type[BaseModel] | None:
    """The first of them."""
    return next(iter(members(annotation)), None)


def _child(node: Any, part: str, override: str, empty: dict | list) -> Any:
    """The table or list below `node`; `empty` when it is not there yet."""
    if isinstance(node, list):
        return node[_index(node, part, override)]
    child = node.setdefault(part, empty)
    if not isinstance(child, dict | list):
        raise UserError(f"override {override!r}: {part!r} holds a value, not a section")
    return child


def _index(node: list, part: str, override: str) -> int:
    """A position in a list of tables; one past the end appends."""
    if not part.isdigit() or int(part) > len(node):
        raise UserError(
            f"override {override!r}: {part!r} must be a position in a list of {len(node)}"
        )
    if int(part) == len(node):
        node.append({})
    return int(part)
