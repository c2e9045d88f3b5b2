"""Rules that several systems share: trainers built on Hugging Face's use the same names."""

from typing import Any

from jaxtrain.convert.conversion import Conversion, ConversionRule, always, by, to

SCHEDULES = {
    "cosine": "cosine",
    "linear": "linear",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "inverse_sqrt": "inverse_sqrt",
    "cosine_with_min_lr": "cosine",
    "warmup_stable_decay": "wsd",
}
OPTIMIZERS = {
    "adamw": "adamw",
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw_hf": "adamw",
    "adamw_torch_8bit": "adamw",
    "adamw_bnb_8bit": "adamw",
    "adamw_8bit": "adamw",
    "paged_adamw_32bit": "adamw",
    "paged_adamw_8bit": "adamw",
    "adafactor": "adafactor",
    "lion_pytorch": "lion",
    "lion_8bit": "lion",
    "lion_32bit": "lion",
    "paged_lion_8bit": "lion",
    "paged_lion_32bit": "lion",
    "muon": "muon",
    "sgd": "sgd",
}
KERNELS = always("the kernel follows from model, data and device")
OBJECTIVES = {
    name: name
    for name in (
        *("grpo", "dr_grpo", "bnpo", "dapo", "gdpo", "gspo", "cispo", "rloo", "sapo", "luspo"),
        *("vespo", "gmpo"),
    )
}


def dot(section: str, *names: str) -> dict[str, ConversionRule]:
    """Keys that are called the same here, in one section."""
    return {name: to(f"{section}.{name}") for name in names}


@by("optim.name, optim.moments, optim.offload")
def optimizer(conversion: Conversion, value: Any) -> None:
    to("optim.name", OPTIMIZERS).apply(conversion, value)
    if isinstance(value, str) and "8bit" in value:
        conversion.set("optim.moments", "int8")
    if isinstance(value, str) and value.startswith("paged_"):
        conversion.set("optim.offload", True)


@by("model.compute_dtype")
def bf16(conversion: Conversion, value: Any) -> None:
    if value in (True, "auto", "full", "true"):
        conversion.set("model.compute_dtype", "bfloat16")
    elif value is False and not conversion.source.get("fp16"):
        conversion.set("model.compute_dtype", "float32")


@by("model.compute_dtype (bfloat16 or float32)")
def fp16(conversion: Conversion, value: Any) -> None:
    if value is True:
        conversion.set("model.compute_dtype", "bfloat16")
        conversion.log("there is no float16 here; bfloat16 needs no loss scaling")


@by("model.remat")
def checkpointing(conversion: Conversion, value: Any) -> None:
    if value:
        conversion.set("model.remat", "full")
        conversion.log(
            'model.remat = "save_attention" or "dots" recompute less, where memory allows'
        )


@by("log.tensorboard or log.wandb_project")
def report_to(conversion: Conversion, value: Any) -> None:
    trackers = value if isinstance(value, list) else [value]
    if "tensorboard" in trackers or "all" in trackers:
        conversion.set("log.tensorboard", True)
    if ("wandb" in trackers or "all" in trackers) and conversion.get("log.wandb_project") is None:
        conversion.set("log.wandb_project", conversion.source.get("wandb_project") or "huggingface")
    if rest := [name for name in trackers if name not in ("tensorboard", "wandb", "all", "none")]:
        conversion.miss(f"log.sinks can name a class of your own for {', '.join(map(str, rest))}")


@by("run.resume")
def resume(conversion: Conversion, value: Any) -> None:
    if value:
        conversion.set("run.resume", "auto")
        conversion.log("a run goes on from the newest checkpoint in its own run.output_dir")


def steps(key: str) -> ConversionRule:
    """A number of steps; a share of the run has no counterpart."""

    def apply(conversion: Conversion, value: Any) -> None:
        if isinstance(value, float) and value < 1:
            conversion.miss(f"{key} counts steps")
        elif value:
            conversion.set(key, int(value))

    return ConversionRule(key, apply, key)


def strategy(key: str) -> ConversionRule:
    """When: by steps, which other keys tell, or once an epoch."""

    def apply(conversion: Conversion, value: Any) -> None:
        if value == "epoch":
            conversion.set(key, 1)
        elif value in (False, "no") and key.startswith("eval."):
            conversion.set("eval.every", "never")

    never = '; "no" is eval.every = "never"' if key.startswith("eval.") else ""
    return ConversionRule(f"{key}, or by steps{never}", apply, key)


@by("adapter.target")
def lora_targets(conversion: Conversion, value: Any) -> None:
    conversion.set("adapter.target", "all-linear" if value in (True, "all-linear") else value)


@by("adapter.train_embeddings and adapter.train_head")
def train_whole(conversion: Conversion, value: Any) -> None:
    names = {"embed_tokens": "adapter.train_embeddings", "lm_head": "adapter.train_head"}
    for name in value or []:
        if name in names:
            conversion.set(names[name], True)
        else:
            conversion.miss(f"{name!r}: only embed_tokens and lm_head can be trained in full")


@by('adapter.quantize = "nf4"')
def load_4bit(conversion: Conversion, value: Any) -> None:
    if value:
        fused = conversion.source.get("quantize_moe_experts")
        conversion.set("adapter.quantize", "nf4_fused" if fused else "nf4")


@by("adapter.target, by names of experts' matrices")
def lora_parameters(conversion: Conversion, value: Any) -> None:
    for name in value or []:
        if not _experts_of(name):
            conversion.miss(
                f"{name!r}: of parameters, only the matrices of experts have adapters here"
            )


def _experts_of(name: Any) -> list[str]:
    """Return adapter.target's name of a parameter of experts."""
    *_, owner, part = ["", "", *str(name).split(".")]
    parts = {"gate_up": ["gate", "up"], "gate": ["gate"], "up": ["up"], "down": ["down"]}
    matrices = parts.get(part.removesuffix("_proj"), []) if owner in ("experts", "") else []
    return [f"experts.{matrix}" for matrix in matrices]


@by('adapter.quantize = "int8"')
def load_8bit(conversion: Conversion, value: Any) -> None:
    if value:
        conversion.set("adapter.quantize", "int8")


@by('adapter.kind = "dora"')
def dora(conversion: Conversion, value: Any) -> None:
    if value:
        conversion.set("adapter.kind", "dora")


def hub_key(name: str) -> ConversionRule:
    """An option of the observer that `push` writes."""
    return by(f'observers: kind = "hub" with options.{name}')(lambda conversion, value: None)


TRAINER: dict[str, ConversionRule] = {
    **dot("optim", "learning_rate", "weight_decay", "max_grad_norm", "warmup_steps"),
    **dot("optim", "warmup_ratio", "gradient_accumulation_steps"),
    **dot("run", "output_dir", "seed"),
    "max_steps": by("run.max_steps")(lambda conversion, value: _max_steps(conversion, value)),
    "optim": optimizer,
    "optimizer": optimizer,
    "lr_scheduler": to("optim.lr_scheduler", SCHEDULES),
    "lr_scheduler_type": to("optim.lr_scheduler", SCHEDULES),
    "adam_beta1": to("optim.beta1"),
    "adam_beta2": to("optim.beta2"),
    "adam_epsilon": to("optim.eps"),
    "bf16": bf16,
    "fp16": fp16,
    "tf32": always("products of bfloat16 need none; float32 ones are not rounded"),
    "gradient_checkpointing": checkpointing,
    "gradient_checkpointing_kwargs": always("model.remat says all"),
    "save_steps": steps("checkpoint.every"),
    "save_total_limit": to("checkpoint.keep"),
    "eval_steps": steps("eval.every"),
    "logging_steps": steps("log.every"),
    "report_to": report_to,
    "resume_from_checkpoint": resume,
    "attn_implementation": KERNELS,
    "experts_implementation": KERNELS,
    "deepspeed": always("parallel.fsdp shards weights, gradients and optimizer state"),
    "torch_compile": always("every step is compiled"),
    "use_liger_kernel": always("the head's loss never makes an array of tokens x vocabulary"),
    "ddp_timeout": to("parallel.meet_timeout"),
    "ddp_find_unused_parameters": always("gradients of one program"),
    "dataloader_num_workers": to("data.num_workers"),
    "remove_unused_columns": always("columns that are not read cost nothing"),
    "trust_remote_code": always("foreign code is never run for a model; see docs/extending.md"),
    "neftune_noise_alpha": to("model.neftune_alpha"),
    "lora_dropout": to("adapter.dropout"),
    "loraplus_lr_ratio": to("optim.lora_plus_ratio"),
    "loraplus_lr_embedding": to(
        "optim.embedding_lr", note="of tables that are trained in full; none has an adapter here"
    ),
    "push_to_hub": by('observers: kind = "hub"')(lambda conversion, value: push(conversion, value)),
    "hub_model_id": hub_key("repo"),
    "hub_strategy": hub_key("strategy"),
    "hub_private_repo": hub_key("private"),
    "hub_revision": hub_key("branch"),
    "hub_token": always("the token is HF_TOKEN's, or that of `hf auth login`"),
    "hub_always_push": always("every push is conversion, the newest first"),
    "lora_r": to("adapter.rank"),
    "lora_alpha": to("adapter.alpha"),
    "lora_target_modules": lora_targets,
    "lora_target_parameters": lora_parameters,
    "lora_modules_to_save": train_whole,
    "load_in_4bit": load_4bit,
    "load_in_8bit": load_8bit,
}


HUB_STRATEGIES = ("end", "every_save", "checkpoint", "all_checkpoints")


def push(conversion: Conversion, enabled: Any) -> None:
    """Convert all keys about pushing to the Hub to the observer `hub`."""
    if not enabled:
        return
    source = conversion.source
    repo = source.get("hub_model_id")
    if repo is None:
        repo = str(source.get("output_dir") or "model").rstrip("/").rpartition("/")[2]
        conversion.log(f"the repository is called {repo!r}, by output_dir")
    strategy = source.get("hub_strategy") or "every_save"
    options = {"repo": repo, "strategy": strategy if strategy in HUB_STRATEGIES else "end"}
    if source.get("hub_private_repo") is False:
        options["private"] = False
    if source.get("hub_revision"):
        options["branch"] = source["hub_revision"]
    conversion.set("observers", [{"kind": "hub", "options": options}])


def _max_steps(conversion: Conversion, value: Any) -> None:
    """It outweighs a number of epochs, which theirs allow beside it."""
    if isinstance(value, int) and value > 0:
        conversion.set("run.max_steps", value)
        conversion.table["run"].pop("num_epochs", None)


@by("run.num_epochs")
def epochs(conversion: Conversion, value: Any) -> None:
    if value and not conversion.get("run.max_steps"):
        conversion.set("run.num_epochs", value)


def settle(conversion: Conversion) -> None:
    """Apply what follows from several keys together: quantized weights carry an adapter, and a
    server takes an adapter as such."""
    if conversion.get("adapter.quantize") and not conversion.get("adapter.kind"):
        conversion.set("adapter.kind", "lora")
    if parameters := conversion.source.get("lora_target_parameters"):
        targets = conversion.get("adapter.target") or []
        names = [targets] if isinstance(targets, str) else list(targets)
        for parameter in parameters if isinstance(parameters, list) else ():
            names += [name for name in _experts_of(parameter) if name not in names]
        conversion.set("adapter.target", names or None)
    if conversion.get("rollout.engine") == "vllm" and conversion.get("adapter.kind") == "lora":
        conversion.set("rollout.vllm.sync", "lora")
