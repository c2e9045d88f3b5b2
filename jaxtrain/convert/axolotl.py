"""Axolotl's YAML."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxtrain.convert.conversion import Conversion, ConversionRule, always, by, missing, to
from jaxtrain.convert.nemo_gym import PLUGIN, settle_gym
from jaxtrain.convert.nemo_gym import RULES as GYM
from jaxtrain.convert.shared import (
    KERNELS,
    TRAINER,
    dora,
    epochs,
    load_4bit,
    lora_targets,
    push,
    resume,
    settle,
    strategy,
)
from jaxtrain.convert.trl import GRPO

FORMATS = {
    "chat_template": "chat",
    "sharegpt": "chat",
    "alpaca": "alpaca",
    "completion": "completion",
    "pretrain": "completion",
    "input_output": "input_output",
}
DATASET = {
    "name": to("name"),
    "split": to("split"),
    "streaming": to("streaming"),
    "roles_to_train": by("train_on")(lambda conversion, value: _roles_to_train(conversion, value)),
    "train_on_eos": always("an assistant's turn trains its end-of-turn token"),
    "chat_template": by("model.chat_template")(
        lambda conversion, value: _template(
            conversion, value, "the template is the model's, not a dataset's"
        )
    ),
    "ds_type": always("the file's ending says it"),
    "trust_remote_code": always("datasets with code of their own are not run"),
    "shards": missing("split and max_rows take a part"),
    "message_field_training": by('train_on = "per_message"')(
        lambda conversion, value: conversion.set("train_on", "per_message")
    ),
    "message_field_training_detail": missing(),
    "type": by("format")(lambda conversion, value: _format(conversion, value)),
}
FIELDS = {
    "field": "text",
    "field_messages": "messages",
    "field_chosen": "chosen",
    "field_rejected": "rejected",
    "field_tools": "tools",
    "message_field_role": "messages.role",
    "message_field_content": "messages.content",
    "message_property_mappings": "messages",
    "field_instruction": "instruction",
    "field_input": "input",
    "field_output": "output",
    "field_system": "system",
}


DEFAULTS = {"sequence_len": 512, "lr_scheduler": "cosine"}
"""What Axolotl takes where a file says nothing, and this project would take something else."""


def detect(table: Mapping[str, Any]) -> bool:
    """Return whether a table looks like this system's."""
    return "base_model" in table


def convert(table: Mapping[str, Any]) -> Conversion:
    """Their config in ours."""
    conversion = Conversion(table)
    conversion.run(RULES, {**DEFAULTS, **table})
    settle(conversion)
    settle_gym(conversion)
    if table.get("train_on_inputs"):
        for dataset in conversion.get("data.datasets") or []:
            dataset.setdefault("train_on", "all")
    return conversion


def _hold_out(conversion: Conversion, value: Any) -> None:
    """Their number of rows is of all datasets together."""
    if conversion.source.get("test_datasets") or not value:
        return
    conversion.set("data.validation_split", value)
    if value >= 1 and len(conversion.source.get("datasets") or []) > 1:
        conversion.log(
            "here it is so many rows of each dataset; give each its own number with held_out, or a"
            " share below 1, which is of all of them"
        )


def _read_datasets(key: str) -> ConversionRule:
    def apply(conversion: Conversion, value: Any) -> None:
        conversion.set(
            key, [_read_dataset(conversion, d) for d in value or [] if isinstance(d, Mapping)]
        )

    return ConversionRule(key, apply, inner=DATASET)


def _read_dataset(conversion: Conversion, source: Mapping[str, Any]) -> dict[str, Any]:
    """Convert one entry; keys without a counterpart are noted with the others."""
    path, files = source.get("path"), source.get("data_files")
    if files and path in ("json", "csv", "parquet", "arrow", "text", None):
        path = files if isinstance(files, str) else files[0]
        if not isinstance(files, str) and len(files) > 1:
            conversion.notes.append(
                ("datasets.data_files", "a dataset here is one file or one folder")
            )
    dataset = Conversion(source, {"path": path})
    kind = source.get("type")
    named = {**source, **(kind if isinstance(kind, Mapping) else {})}
    flat: dict[str, Any] = {}
    for name, field_name in FIELDS.items():
        field_value = named.get(name)
        if isinstance(field_value, Mapping):
            flat |= {f"{field_name}.{key}": column for key, column in field_value.items()}
        elif field_value not in (None, field_name):
            flat[field_name] = field_value
    rest = {k: v for k, v in source.items() if k not in ("path", "data_files", "roles", *FIELDS)}
    dataset.run(DATASET, rest, prefix="datasets.")
    if flat:
        dataset.set("fields", flat)
    if roles := source.get("roles"):
        dataset.set(
            "roles",
            {name: field_name for field_name, names in roles.items() for name in _list(names)},
        )
    conversion.missed += dataset.missed
    conversion.notes += dataset.notes
    return dataset.table


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _format(conversion: Conversion, value: Any) -> None:
    if isinstance(value, Mapping):
        conversion.set("format", "alpaca")
        return
    name = str(value).split(".")[0].split(":")[0]
    if name in FORMATS:
        # A preference pair has its columns; which they are is seen in the data.
        if "." not in str(value):
            conversion.set("format", FORMATS[name])
    else:
        conversion.miss('format "auto" tells from the columns, or name a function of your own')


def _roles_to_train(conversion: Conversion, value: Any) -> None:
    if set(_list(value)) - {"assistant", "gpt", "model"}:
        conversion.miss('train_on knows "assistant", "all", "last" and "per_message"')


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


def _template(conversion: Conversion, value: Any, note: str = "") -> None:
    if value in (None, "tokenizer_default") or value == "jinja":
        return
    if isinstance(value, str) and value.startswith("tokenizer_default"):
        conversion.log("the tokenizer's own template is used; without one there is an error")
        return
    if not note and value in TEMPLATES:
        conversion.set("model.chat_template", TEMPLATES[value])
        if value in TEMPLATE_NOTES:
            conversion.log(TEMPLATE_NOTES[value])
        return
    conversion.miss(
        note or "model.chat_template is a name or a file with a Jinja template; save it"
    )


def _special(conversion: Conversion, value: Any) -> None:
    names = ("bos_token", "eos_token", "pad_token", "unk_token", "additional_special_tokens")
    for name, token in (value or {}).items():
        if name in names:
            conversion.set(f"model.special_tokens.{name}", token)
        else:
            conversion.miss(f"model.special_tokens has {', '.join(names)}")


def _quantize_experts(conversion: Conversion, value: Any) -> None:
    if value and (
        conversion.source.get("load_in_4bit") or conversion.source.get("adapter") == "qlora"
    ):
        conversion.set("adapter.quantize", "nf4_fused")


@by("adapter.kind")
def _adapter(conversion: Conversion, value: Any) -> None:
    if value in ("lora", "qlora") and conversion.get("adapter.kind") is None:
        conversion.set("adapter.kind", "lora")
    if value == "qlora":
        load_4bit.apply(conversion, True)
    if value not in ("lora", "qlora", None):
        conversion.miss("adapter.kind is lora or dora")


@by("task.kind and task.loss or task.objective")
def _rl(conversion: Conversion, value: Any) -> None:
    if value in ("grpo", "gdpo"):
        conversion.set("task.kind", "rl")
        conversion.set("task.objective", value)
        if conversion.get("sampling.temperature") is None:
            conversion.set("sampling.temperature", 1.0)
    elif value in ("dpo", "ipo", "kto", "orpo", "simpo", "cpo"):
        conversion.set("task.kind", "preference")
        conversion.set("task.loss", {"dpo": "sigmoid"}.get(value, value))
    elif value:
        conversion.miss("see docs/reference/config.md for the tasks")


@by('task.kind = "reward_model"')
def _reward_model(conversion: Conversion, value: Any) -> None:
    if value:
        conversion.set("task.kind", "reward_model")


@by('task.kind = "reward_model" with task.labels = "steps"')
def _process_reward_model(conversion: Conversion, value: Any) -> None:
    if value:
        conversion.set("task.kind", "reward_model")
        conversion.set("task.labels", "steps")


@by("sections task, rollout and sampling")
def _trl(conversion: Conversion, value: Any) -> None:
    conversion.run(GRPO | TRL_ONLY, value or {}, prefix="trl.")
    if value and value.get("use_vllm") and value.get("vllm_server_port"):
        host = value.get("vllm_server_host") or "127.0.0.1"
        conversion.set("rollout.vllm.servers", [f"http://{host}:{value['vllm_server_port']}"])


UNREAD = "used here: Axolotl's training does not read it"
DIFFUSION: dict[str, ConversionRule] = {
    "noise_schedule": to(
        "task.noise_schedule", {"linear": "linear", "cosine": "cosine"}, note=UNREAD
    ),
    "min_mask_ratio": to("task.min_mask_ratio", note=UNREAD),
    "max_mask_ratio": to("task.max_mask_ratio", note=UNREAD),
    "num_diffusion_steps": always("t is continuous"),
    "eps": to("task.eps"),
    "importance_weighting": to("task.importance_weighting"),
    "mask_token_id": to("task.mask_token_id"),
    "mask_token_str": to("task.mask_token"),
    "generate_samples": always("[[eval.sets]] has problems answered"),
    "generation_interval": to("eval.every"),
    "num_generation_samples": to("eval.show"),
    "generation_steps": to("task.steps"),
    "generation_temperature": to("sampling.temperature"),
    "generation_max_length": to("sampling.max_new_tokens"),
}


def _diffusion(conversion: Conversion, value: Any) -> None:
    conversion.set("task.kind", "diffusion")
    conversion.run(DIFFUSION, value or {}, prefix="diffusion.")


TRL_ONLY = {"use_data_producer": always('rollout.mode = "prefetch" or "async"')}

RULES: dict[str, ConversionRule] = {
    **TRAINER,
    "base_model": to("model.path"),
    "tokenizer_config": to("model.tokenizer"),
    "base_model_config": missing("config.json stands in the folder of model.path"),
    "model_type": always("config.json names it"),
    "tokenizer_type": always("the tokenizer's files name it"),
    "num_epochs": epochs,
    "micro_batch_size": to("data.micro_batch_size"),
    "batch_size": to("data.global_batch_size"),
    "eval_batch_size": always("held-out rows use data.micro_batch_size"),
    "sequence_len": to("data.sequence_len"),
    "sample_packing": to("data.packing"),
    "eval_sample_packing": always("held-out data are packed as training data are"),
    "pad_to_sequence_len": always("rows always have data.sequence_len tokens"),
    "sample_packing_group_size": always("data.packing_window samples are looked ahead at"),
    "sample_packing_bin_size": always("rows are filled as far as they go"),
    "multipack_real_batches": always("rows are packed, documents stay apart"),
    "excess_length_strategy": to("data.too_long", {"drop": "drop", "truncate": "truncate"}),
    "dataset_prepared_path": always("data.cache keeps what was tokenized"),
    "dataset_processes": to("data.num_workers"),
    "shuffle_merged_datasets": to("data.shuffle"),
    "datasets": _read_datasets("data.datasets"),
    "pretraining_dataset": _read_datasets("data.datasets"),
    "test_datasets": _read_datasets("data.eval_datasets"),
    "val_set_size": by("data.validation_split")(
        lambda conversion, value: _hold_out(conversion, value)
    ),
    "train_on_inputs": by('train_on = "all" of a dataset')(lambda conversion, value: None),
    "group_by_length": always("packing leaves nothing to group"),
    "chat_template": by("model.chat_template")(_template),
    "chat_template_jinja": by("model.chat_template, a file")(
        lambda conversion, value: conversion.miss(
            "save it as a file and name it in model.chat_template"
        )
    ),
    "special_tokens": by("model.special_tokens")(
        lambda conversion, value: _special(conversion, value)
    ),
    "tokens": to("model.added_tokens"),
    "peft_trainable_token_indices": always("rows of added tokens train beside an adapter"),
    "added_tokens_overrides": missing("model.added_tokens adds new ones"),
    "adapter": _adapter,
    "lora_model_dir": to("adapter.path"),
    "lora_target_linear": lora_targets,
    "lora_fan_in_fan_out": always("layouts are known by family"),
    "peft_use_dora": dora,
    "peft_use_rslora": to("adapter.rslora"),
    "lora_mlp_kernel": KERNELS,
    "lora_qkv_kernel": KERNELS,
    "lora_o_kernel": KERNELS,
    "flash_attention": KERNELS,
    "flex_attention": KERNELS,
    "sdp_attention": KERNELS,
    "xformers_attention": KERNELS,
    "s2_attention": missing(),
    "flash_attn_cross_entropy": KERNELS,
    "flash_attn_rms_norm": KERNELS,
    "cut_cross_entropy": KERNELS,
    "liger_rope": KERNELS,
    "liger_rms_norm": KERNELS,
    "liger_glu_activation": KERNELS,
    "liger_fused_linear_cross_entropy": KERNELS,
    "plugins": by("nothing: kernels are built in, other plugins are entry points")(
        lambda conversion, value: _plugins(conversion, value)
    ),
    "fsdp": always("parallel.fsdp takes all devices unless it is told otherwise"),
    "fsdp_config": always("parallel.fsdp takes all devices unless it is told otherwise"),
    "fsdp_version": always("parallel.fsdp takes all devices unless it is told otherwise"),
    "dp_shard_size": to("parallel.fsdp"),
    "dp_replicate_size": to("parallel.data"),
    "tensor_parallel_size": to("parallel.tensor"),
    "context_parallel_size": to("parallel.context"),
    "sequence_parallel_degree": to("parallel.context"),
    "expert_parallel_size": to("parallel.expert"),
    "cosine_min_lr_ratio": to("optim.min_lr_ratio"),
    "evals_per_epoch": to("eval.per_epoch"),
    "saves_per_epoch": to("checkpoint.per_epoch"),
    "eval_strategy": strategy("eval.per_epoch"),
    "save_strategy": strategy("checkpoint.per_epoch"),
    "early_stopping_patience": to(
        "eval.patience", note='needs checkpoint.best_metric, such as "eval/loss"'
    ),
    "hub_model_id": by('observers: kind = "hub" with options.repo')(push),
    "load_best_model_at_end": missing("checkpoint.best_metric keeps the best one"),
    "save_safetensors": always("it is the only form"),
    "save_only_model": missing("checkpoints are whole; run.output_dir/model holds the weights"),
    "auto_resume_from_checkpoints": resume,
    "wandb_project": to("log.wandb_project"),
    "wandb_name": to("log.wandb_name"),
    "wandb_run_id": always("a resumed run keeps its own id"),
    "wandb_entity": missing("set WANDB_ENTITY"),
    "wandb_mode": missing("set WANDB_MODE"),
    "wandb_watch": missing(),
    "wandb_log_model": missing(),
    "use_tensorboard": to("log.tensorboard"),
    "quantize_moe_experts": by('adapter.quantize = "nf4_fused"')(_quantize_experts),
    "quantization": always("jaxtrain quantize RUN --scheme fp8, int8 or int4, after the training"),
    "fp8": to("model.matmul", {True: "fp8", False: "default"}),
    "fp8_enable_fsdp_float8_all_gather": missing("weights are gathered in model.compute_dtype"),
    "qat": missing("weights are rounded after the training alone: jaxtrain quantize"),
    "strict": always("unknown keys are always refused"),
    "debug": always("`jaxtrain preprocess` shows samples"),
    "unfrozen_parameters": missing(),
    "rl": _rl,
    "rl_beta": to("task.beta"),
    "dpo_beta": to("task.beta"),
    "orpo_alpha": to("task.beta"),
    "dpo_label_smoothing": to("task.label_smoothing"),
    "dpo_use_weighting": to("task.use_weighting"),
    "rpo_alpha": to("task.cpo_alpha"),
    "cpo_alpha": to("task.cpo_alpha"),
    "simpo_gamma": to("task.simpo_gamma"),
    "kto_desirable_weight": to("task.desirable_weight"),
    "kto_undesirable_weight": to("task.undesirable_weight"),
    "precompute_ref_log_probs": by('task.reference = "precomputed"')(
        lambda conversion, value: conversion.set("task.reference", "precomputed") if value else None
    ),
    "reward_model": _reward_model,
    "process_reward_model": _process_reward_model,
    "center_rewards_coefficient": to("task.center_rewards_coefficient"),
    "trl": replace(_trl, inner=GRPO | TRL_ONLY),
    **GYM,
    "diffusion": replace(by('task.kind = "diffusion"')(_diffusion), inner=DIFFUSION),
}
"""Every key that is known."""

BUILT_IN = ("liger", "cut_cross_entropy", "diffusion", PLUGIN)
"""Parts of the names of plugins that are built in here."""


def _plugins(conversion: Conversion, value: Any) -> None:
    for name in _list(value or []):
        if not any(part in str(name) for part in BUILT_IN):
            conversion.miss(
                f"{name}: see docs/reference/config.md for what is built in, docs/extending.md"
                f" for more"
            )
