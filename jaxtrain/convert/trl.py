"""TRL's command lines (`trl dpo --model_name_or_path ...`) and its YAML files."""

import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from jaxtrain.convert.conversion import Conversion, ConversionRule, always, by, missing, to
from jaxtrain.convert.shared import (
    OBJECTIVES,
    TRAINER,
    dora,
    epochs,
    load_4bit,
    lora_targets,
    settle,
    strategy,
)
from jaxtrain.errors import UserError
from jaxtrain.text_safety import show

METHODS = ("sft", "dpo", "kto", "grpo", "rloo", "reward", "cpo", "orpo", "gkd", "online_dpo", "prm")


@by("rollout.engine")
def _use_vllm(conversion: Conversion, value: Any) -> None:
    if value:
        conversion.set("rollout.engine", "vllm")


@by("rollout.vllm.servers")
def _server(conversion: Conversion, value: Any) -> None:
    port = conversion.source.get("vllm_server_port", 8000)
    host = conversion.source.get("vllm_server_host", "127.0.0.1")
    url = conversion.source.get("vllm_server_base_url") or f"http://{host}:{port}"
    conversion.set("rollout.vllm.servers", [url])


@by("[[rewards]]")
def _rewards(conversion: Conversion, value: Any) -> None:
    names = value if isinstance(value, list) else [value]
    weights = conversion.source.get("reward_weights") or (conversion.source.get("trl") or {}).get(
        "reward_weights"
    )
    conversion.set("rewards", [{"function": str(name)} for name in names])
    for reward, weight in zip(conversion.table["rewards"], weights or [], strict=False):
        reward["weight"] = float(weight)
    conversion.log(
        'a function of your own is "file.py:name" or "package.module:name"; see docs/rl.md'
    )


@by("rollout.group_size")
def _generations(conversion: Conversion, value: Any) -> None:
    conversion.set("rollout.group_size", value)


@by("task.reference")
def _sync_reference(conversion: Conversion, value: Any) -> None:
    if value:
        conversion.set("task.reference", "mixed")


@by("task.scale_rewards")
def _scale(conversion: Conversion, value: Any) -> None:
    names = {True: "group", "true": "group", False: "none", "false": "none"}
    conversion.set("task.scale_rewards", names.get(value, value))


GRPO: dict[str, ConversionRule] = {
    "beta": to("task.beta"),
    "num_generations": _generations,
    "max_completion_length": to("sampling.max_new_tokens"),
    "max_prompt_length": to("data.sequence_len", note="prompt and answer together; check the sum"),
    "temperature": to("sampling.temperature"),
    "top_p": to("sampling.top_p"),
    "top_k": by("sampling.top_k")(
        lambda conversion, value: conversion.set("sampling.top_k", max(0, value)) if value else None
    ),
    "min_p": to("sampling.min_p"),
    "num_iterations": to("task.num_iterations"),
    "epsilon": to("task.epsilon"),
    "epsilon_high": to("task.epsilon_high"),
    "delta": to("task.delta"),
    "loss_type": to("task.objective", OBJECTIVES),
    "scale_rewards": _scale,
    "importance_sampling_level": to(
        "task.ratio", {"token": "token", "sequence": "sequence", "sequence_token": "sequence_token"}
    ),
    "mask_truncated_completions": to("task.mask_truncated_completions"),
    "top_entropy_quantile": to("task.top_entropy_quantile"),
    "sync_ref_model": _sync_reference,
    "ref_model_mixup_alpha": to("task.reference_alpha"),
    "ref_model_sync_steps": to("task.reference_every"),
    "reward_funcs": _rewards,
    "reward_weights": by("weight of each of the [[rewards]]")(lambda conversion, value: None),
    "use_vllm": _use_vllm,
    "vllm_mode": by("rollout.engine")(
        lambda conversion, value: (
            conversion.miss('in one process there is rollout.engine = "local"')
            if value == "colocate"
            else None
        )
    ),
    "vllm_server_host": _server,
    "vllm_server_port": _server,
    "vllm_server_base_url": _server,
    "vllm_server_timeout": to("rollout.vllm.wait_seconds"),
    "vllm_gpu_memory_utilization": always("it is said where the server is started"),
    "vllm_max_model_len": always("it is said where the server is started"),
    "vllm_importance_sampling_correction": by("task.importance_correction")(
        lambda conversion, value: conversion.set(
            "task.importance_correction", "token_truncate" if value else "none"
        )
    ),
    "vllm_importance_sampling_cap": to("task.importance_max"),
    "log_completions": always("samples.jsonl keeps answers of every round"),
    "num_completions_to_print": to("rollout.samples"),
    "generation_batch_size": missing("rollout.prompts_per_step x rollout.group_size answers"),
    "steps_per_generation": to("task.num_minibatches"),
    "shuffle_dataset": to("data.shuffle"),
    "cast_lm_head_to_fp32": always("log-probs are computed in float32"),
    "async_prefetch": by('rollout.mode = "async"')(
        lambda conversion, value: conversion.set("rollout.mode", "async") if value else None
    ),
    "use_transformers_paged": always("the local sampler decodes all answers of a round together"),
}
"""Sampling and objective; Axolotl's section `trl` has the same."""

RULES: dict[str, ConversionRule] = {
    **TRAINER,
    **GRPO,
    "model_name_or_path": to("model.path"),
    "model_revision": missing("download the revision and name its folder"),
    "dtype": to(
        "model.compute_dtype", {"auto": "bfloat16", "bfloat16": "bfloat16", "float32": "float32"}
    ),
    "torch_dtype": to("model.compute_dtype", {"auto": "bfloat16", "bfloat16": "bfloat16"}),
    "dataset_name": by("data.datasets")(
        lambda conversion, value: _dataset(conversion, {"path": value})
    ),
    "dataset_config": by("name of a dataset")(
        lambda conversion, value: _dataset(conversion, {"name": value})
    ),
    "dataset_train_split": by("split of a dataset")(
        lambda conversion, value: _dataset(conversion, {"split": value})
    ),
    "dataset_test_split": by("data.eval_datasets")(lambda conversion, value: None),
    "dataset_streaming": by("streaming of a dataset")(
        lambda conversion, value: _dataset(conversion, {"streaming": value})
    ),
    "dataset_text_field": by('fields = { text = "..." } of a dataset')(
        lambda conversion, value: (
            _dataset(conversion, {"fields": {"text": value}}) if value != "text" else None
        )
    ),
    "dataset_num_proc": to("data.num_workers"),
    "num_train_epochs": epochs,
    "per_device_train_batch_size": to(
        "data.micro_batch_size", note="rows here, and with data.packing a row holds many samples"
    ),
    "per_device_eval_batch_size": always("held-out rows use data.micro_batch_size"),
    "max_length": to("data.sequence_len"),
    "max_seq_length": to("data.sequence_len"),
    "packing": to("data.packing"),
    "packing_strategy": always("packed rows keep documents apart and whole"),
    "eval_packing": always("held-out data are packed as training data are"),
    "padding_free": always("rows are packed, documents stay apart"),
    "assistant_only_loss": by("train_on of a dataset")(
        lambda conversion, value: _dataset(
            conversion, {"train_on": "assistant" if value else "all"}
        )
    ),
    "completion_only_loss": by("train_on of a dataset")(
        lambda conversion, value: _dataset(
            conversion, {"train_on": "assistant" if value else "all"}
        )
    ),
    "eval_strategy": strategy("eval.per_epoch"),
    "save_strategy": strategy("checkpoint.per_epoch"),
    "logging_strategy": always("log.every says when"),
    "run_name": to("log.wandb_name"),
    "use_peft": by('adapter.kind = "lora"')(
        lambda conversion, value: (
            conversion.set("adapter.kind", conversion.get("adapter.kind") or "lora")
            if value
            else None
        )
    ),
    "lora_target_modules": lora_targets,
    "lora_task_type": always("the task says it"),
    "use_rslora": to("adapter.rslora"),
    "use_dora": dora,
    "use_bnb_nested_quant": always("nf4 is stored with double quantization"),
    "bnb_4bit_quant_type": by('adapter.quantize = "nf4"')(load_4bit.apply),
    "label_smoothing": to("task.label_smoothing"),
    "f_divergence_type": to(
        "task.f_divergence", {"reverse_kl": "reverse_kl", "js_divergence": "js"}
    ),
    "use_weighting": to("task.use_weighting"),
    "ld_alpha": to("task.ld_alpha"),
    "rpo_alpha": to("task.cpo_alpha"),
    "cpo_alpha": to("task.cpo_alpha"),
    "simpo_gamma": to("task.simpo_gamma"),
    "desirable_weight": to("task.desirable_weight"),
    "undesirable_weight": to("task.undesirable_weight"),
    "precompute_ref_log_probs": by('task.reference = "precomputed"')(
        lambda conversion, value: conversion.set("task.reference", "precomputed") if value else None
    ),
    "center_rewards_coefficient": to("task.center_rewards_coefficient"),
    "disable_dropout": always("no layer drops anything"),
    "chat_template_path": to("model.chat_template"),
    "do_eval": always("eval.every says when"),
    "do_train": always("that is what `jaxtrain --config` does"),
}


DEFAULTS: dict[str, dict[str, Any]] = {
    "sft": {"learning_rate": 2e-5, "max_length": 1024, "packing": False},
    "dpo": {"learning_rate": 1e-6, "max_length": 1024, "beta": 0.1},
    "kto": {"learning_rate": 1e-6, "max_length": 1024, "beta": 0.1},
    "reward": {"learning_rate": 1e-4, "max_length": 1024},
    "grpo": {"learning_rate": 1e-6, "beta": 0.0, "num_generations": 8, "loss_type": "dapo"},
    "rloo": {"learning_rate": 1e-6, "beta": 0.05, "num_generations": 2},
}
"""What TRL takes where a line says nothing, and this project would take something else."""
COMMON_DEFAULTS = {
    "num_train_epochs": 3.0,
    "per_device_train_batch_size": 8,
    "lr_scheduler_type": "linear",
    "gradient_checkpointing": True,
}
SAMPLING_DEFAULTS = {"max_completion_length": 512, "temperature": 1.0}


def detect(table: Mapping[str, Any]) -> bool:
    """Return whether a table looks like this system's."""
    return "model_name_or_path" in table or "dataset_name" in table


def parse_command(text: str) -> dict[str, Any]:
    """A command line as a table; what it runs is under the key `command`."""
    words = shlex.split(text.replace("\\\n", " "), comments=True)
    while words and ("=" in words[0] and not words[0].startswith("-")):
        words = words[1:]  # variables of the environment
    table: dict[str, Any] = {"command": _method(words)}
    key = None
    for word in words:
        if word.startswith("--no_"):
            table[word[5:].replace("-", "_")], key = False, None
        elif word.startswith("--"):
            key, equals, value = word[2:].partition("=")
            key = key.replace("-", "_")
            table[key] = _value(value) if equals else True
        elif key is not None:
            old, new = table[key], _value(word)
            if old is True:
                table[key] = new
            else:
                table[key] = [*(old if isinstance(old, list) else [old]), new]
    return table


def _method(words: Sequence[str]) -> str:
    """sft, dpo, ... of `trl dpo` or of `python trl/scripts/dpo.py`."""
    for word in words:
        name = word.rsplit("/", 1)[-1].removesuffix(".py")
        if word.startswith("--"):
            break
        if name in METHODS:
            return name
    raise UserError(
        f"{show(' '.join(words)[:80])}: a TRL command names what it runs, as in `trl dpo"
        f" --model_name_or_path ...`; known are {', '.join(METHODS)}"
    )


def _value(word: str) -> Any:
    """Parse the value of a flag: number, true, false or text."""
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    for kind in (int, float):
        try:
            number = kind(word)
        except ValueError:
            continue
        return number if math.isfinite(number) else word
    return word


def _dataset(conversion: Conversion, keys: Mapping[str, Any]) -> None:
    datasets = conversion.table.setdefault("data", {}).setdefault("datasets", [{}])
    datasets[0].update(keys)


def convert(table: Mapping[str, Any]) -> Conversion:
    """Their config in ours; `command` says which trainer, else the keys do."""
    method = str(table.get("command") or ("grpo" if "reward_funcs" in table else "sft"))
    settings = COMMON_DEFAULTS | DEFAULTS.get(method, {})
    if method in ("grpo", "rloo"):
        settings |= SAMPLING_DEFAULTS
    settings |= table
    conversion = Conversion(settings)
    _set_task(conversion, method, settings.get("loss_type"))
    conversion.run(RULES, {k: v for k, v in settings.items() if k not in ("command", "loss_type")})
    if settings.get("eval_strategy", "no") != "no":
        held = dict((conversion.get("data.datasets") or [{}])[0])
        split = settings.get("dataset_test_split", "test")
        conversion.set("data.eval_datasets", [{**held, "split": split}])
    settle(conversion)
    if conversion.get("adapter") and not conversion.get("adapter.kind"):
        del conversion.table["adapter"]  # of a line without --use_peft
    return conversion


def _set_task(conversion: Conversion, method: str, loss: Any) -> None:
    """Section task of a trainer."""
    if method in ("grpo", "rloo"):
        conversion.set("task.kind", "rl")
        conversion.set("task.objective", "rloo" if method == "rloo" else "grpo")
        if loss and method == "grpo":
            conversion.run({"loss_type": GRPO["loss_type"]}, {"loss_type": loss})
    elif method in ("dpo", "kto", "orpo", "cpo"):
        conversion.set("task.kind", "preference")
        conversion.set("task.loss", loss or {"dpo": "sigmoid"}.get(method, method))
    elif method in ("reward", "prm"):
        conversion.set("task.kind", "reward_model")
        if method == "prm":
            conversion.set("task.labels", "steps")
    elif method == "gkd":
        conversion.set("task.kind", "distillation")
        conversion.notes.append(
            ("command", "see docs/distillation.md for the keys of task.teacher")
        )
    elif method == "sft":
        if loss not in (None, "nll"):
            conversion.run({"loss_type": missing()}, {"loss_type": loss})
    else:
        conversion.run({"command": missing()}, {"command": method})
