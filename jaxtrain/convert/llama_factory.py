"""LLaMA-Factory's YAML, as `llamafactory-cli train` reads it."""

from collections.abc import Mapping
from typing import Any

from jaxtrain.convert.conversion import Conversion, load_rules
from jaxtrain.convert.shared import TRAINER, finish, listed, lora_targets, train_vision, train_whole
from jaxtrain.convert.trl import set_task

DEFAULTS = {
    "learning_rate": 5e-5,
    "num_train_epochs": 3.0,
    "cutoff_len": 2048,
    "lr_scheduler_type": "linear",
    "per_device_train_batch_size": 8,
    "gradient_checkpointing": True,
    "packing": False,
    "freeze_vision_tower": True,
    "freeze_multi_modal_projector": True,
}
"""What LLaMA-Factory takes where a file says nothing, other than here."""
TEMPLATES = {"llama3": "llama3", "gemma": "gemma", "chatml": "chatml", "alpaca": "alpaca"}
IMAGE_PIXELS = 768 * 768
"""LLaMA-Factory's default of image_max_pixels."""
COLUMNS = {"prompt": "instruction", "query": "input", "response": "output", "system": "system"}
PAIRS = {name: name for name in ("messages", "tools", "chosen", "rejected", "images")}
TAGS = {"role_tag": "messages.role", "content_tag": "messages.content"}
ROLES = {"user_tag": "user", "assistant_tag": "assistant", "observation_tag": "tool"}


def detect(table: Mapping[str, Any]) -> bool:
    """Return whether a table looks like this system's."""
    first = "model_name_or_path" in table and ("stage" in table or "finetuning_type" in table)
    return first or ("model" in table and "train_dataset" in table)


def convert(table: Mapping[str, Any]) -> Conversion:
    """Their config in ours; `dataset_info` is the table that stands beside the data."""
    settings = {**DEFAULTS, **table}
    conversion = Conversion(settings)
    stage = str(settings.get("stage") or "sft")
    loss = settings.get("pref_loss") if stage == "dpo" else None
    set_task(conversion, {"rm": "reward", "pt": "sft"}.get(stage, stage), loss)
    conversion.run(RULES, {k: v for k, v in settings.items() if k != "dataset_info"})
    conversion.attempt(_set_adapter_and_data, finish)
    return conversion


def _set_adapter_and_data(conversion: Conversion) -> None:
    settings = conversion.source
    peft = settings.get("peft_config") or {}
    if (settings.get("finetuning_type") or peft.get("name") or "lora") == "lora":
        conversion.set("adapter.kind", conversion.get("adapter.kind") or "lora")
    for name, key in (("r", "rank"), ("lora_alpha", "alpha"), ("lora_dropout", "dropout")):
        conversion.set(f"adapter.{key}", peft.get(name))
    if (rank := conversion.get("adapter.rank")) and not conversion.get("adapter.alpha"):
        conversion.set("adapter.alpha", 2.0 * rank)  # theirs where lora_alpha is unset
    for name, key in (
        ("dataset", "datasets"),
        ("train_dataset", "datasets"),
        ("eval_dataset", "eval_datasets"),
    ):
        names = settings.get(name)
        names = names.split(",") if isinstance(names, str) else list(listed(names))
        if datasets := [_dataset(conversion, str(entry).strip()) for entry in names]:
            conversion.set(f"data.{key}", datasets)
    if conversion.images:
        frozen = {"tower": "freeze_vision_tower", "projector": "freeze_multi_modal_projector"}
        train_vision(conversion, *(part for part, key in frozen.items() if not settings[key]))
        if not settings.get("image_max_pixels"):
            text = f"images of more than {IMAGE_PIXELS:,} pixels are made smaller there; here"
            conversion.log(f"{text} preprocessor_config.json has their size", "image_max_pixels")


def _dataset(conversion: Conversion, name: str) -> dict[str, Any]:
    """Return the dataset of a name: what dataset_info.json says of it, or a file of that name."""
    source = conversion.source
    folder = str(source.get("dataset_dir") or "data").rstrip("/")
    info = (source.get("dataset_info") or {}).get(name)
    dataset: dict[str, Any] = {"path": f"{folder}/{name}.json"}
    if name.startswith("/") or "." in name.rpartition("/")[2]:
        dataset["path"] = name
    elif info is None:
        conversion.log(f"{folder}/dataset_info.json says what {name!r} is; check path", "dataset")
    info = info or {}
    file = info.get("file_name")
    hub = info.get("hf_hub_url")
    if file or hub:
        dataset["path"] = hub or f"{folder}/{file}"
    fields = {}
    columns, tags = info.get("columns") or {}, info.get("tags") or {}
    ranked = info.get("ranking")
    names = ({"prompt": "prompt"} if ranked else COLUMNS) | PAIRS
    for key, column in columns.items():
        if key in names and column != names[key]:
            fields[names[key]] = column
        elif key not in names:
            conversion.missed.append((f"{name}.columns.{key}", column, "no column of that kind"))
    for key, target in TAGS.items():
        if tags.get(key, target.rpartition(".")[2]) != target.rpartition(".")[2]:
            fields[target] = tags[key]
    if "images" in columns:
        conversion.images = f"{name}.columns.images"
    roles = {tags[key]: role for key, role in ROLES.items() if tags.get(key, role) != role}
    chat = info.get("formatting") == "sharegpt" or "messages" in columns
    if source.get("stage", "sft") == "pt":
        dataset["format"] = "completion"
        fields = {"text": column} if (column := columns.get("prompt", "text")) != "text" else {}
    elif not ranked and info and "kto_tag" not in columns:
        dataset["format"] = "chat" if chat else "alpaca"
    if not chat and source.get("stage", "sft") == "sft":
        dataset["as_chat"] = True
    options = {
        "name": info.get("subset"),
        "split": info.get("split"),
        "max_rows": info.get("num_samples") or source.get("max_samples"),
        "streaming": source.get("streaming") or None,
        "train_on": "all"
        if source.get("train_on_prompt")
        else "last"
        if source.get("mask_history")
        else None,
        "fields": fields or None,
        "image_folder": source.get("media_dir") if "images" in columns else None,
        "roles": roles or None,
    }
    return dataset | {key: value for key, value in options.items() if value is not None}


def _type(conversion: Conversion, value: Any) -> None:
    if value not in ("lora", "full"):
        conversion.miss('adapter.kind is "lora" or "dora"; without, all weights are trained')


def _targets(conversion: Conversion, value: Any) -> None:
    names = value.split(",") if isinstance(value, str) else list(listed(value))
    names = [name.strip() for name in names]
    lora_targets(conversion, "all-linear" if names == ["all"] else names)


def _whole(conversion: Conversion, value: Any) -> None:
    train_whole(conversion, str(value).split(","))


def _bits(conversion: Conversion, value: Any) -> None:
    if value in (4, 8):
        conversion.set("adapter.quantize", {4: "nf4", 8: "int8"}[value])
    elif value:
        conversion.miss("adapter.quantize is nf4 or int8")


def _template(conversion: Conversion, value: Any) -> None:
    if value in TEMPLATES:
        conversion.set("model.chat_template", TEMPLATES[value])
    elif value not in (None, "default", "empty"):
        conversion.log("the tokenizer's own chat template is used; model.chat_template replaces it")


def _tokens(conversion: Conversion, value: Any) -> None:
    conversion.set("model.added_tokens", value.split(",") if isinstance(value, str) else value)


def _special(conversion: Conversion, value: Any) -> None:
    tokens = value.split(",") if isinstance(value, str) else list(value or [])
    conversion.set("model.special_tokens.additional_special_tokens", tokens or None)


def _timeout(conversion: Conversion, value: Any) -> None:
    conversion.set("parallel.meet_timeout", min(value, 1_000_000) if value else None)


RULES = {**TRAINER, **load_rules("llama_factory", globals())}
"""Every key that is known."""
