"""prime-rl's TOML, `rl.toml` and `sft.toml`, with the names of several versions."""

from collections.abc import Mapping
from typing import Any

from jaxtrain.convert.conversion import Conversion, ConversionRule, always, by, missing, to
from jaxtrain.convert.shared import KERNELS, lora_targets, train_whole

SECTIONS = ("orchestrator", "trainer", "inference", "deployment")


def detect(table: Mapping[str, Any]) -> bool:
    """Return whether a table looks like this system's."""
    model = table.get("model")
    is_prime_rl = isinstance(model, Mapping) and "name" in model
    return any(name in table for name in SECTIONS) or (is_prime_rl and "data" in table)


def convert(table: Mapping[str, Any]) -> Conversion:
    """Their config in ours."""
    conversion = Conversion(table)
    if "orchestrator" in table:
        conversion.set("task.kind", "rl")
        conversion.set("sampling.temperature", 1.0)
    conversion.run(RULES, table)
    if conversion.get("adapter"):
        conversion.table["adapter"].setdefault("kind", "lora")
    batch = conversion.table.pop("batch_size", None)
    size = conversion.get("rollout.group_size") or 1
    if not (type(batch) is type(size) is int and size > 0):
        return conversion
    if batch and "orchestrator" in table:
        conversion.set("rollout.group_size", size)
        conversion.set("rollout.prompts_per_step", max(1, batch // size))
    elif batch:
        conversion.set("data.global_batch_size", batch)
    return conversion


def section(name: str, rules: Mapping[str, ConversionRule]) -> ConversionRule:
    """A table of theirs by rules of its own."""

    def apply(conversion: Conversion, value: Any) -> None:
        if isinstance(value, Mapping):
            conversion.run(rules, value, prefix=f"{name}.")

    return ConversionRule(
        "spread over several sections; `jaxtrain convert` knows where", apply, inner=rules
    )


@by("optim.name")
def _optimizer(conversion: Conversion, value: Any) -> None:
    to("optim.name", {"adamw": "adamw", "muon": "muon", "sgd": "sgd"}).apply(conversion, value)


OPTIM: dict[str, ConversionRule] = {
    "lr": to("optim.learning_rate"),
    "type": _optimizer,
    "weight_decay": to("optim.weight_decay"),
    "max_norm": to("optim.max_grad_norm"),
    "betas1": to("optim.beta1"),
    "betas2": to("optim.beta2"),
    "mu": to("optim.beta1"),
}
SCHEDULER: dict[str, ConversionRule] = {
    "type": to(
        "optim.lr_scheduler", {"constant": "constant", "linear": "linear", "cosine": "cosine"}
    ),
    "warmup_steps": to("optim.warmup_steps"),
    "decay_steps": missing("optim.decay_ratio is a share of the run, of wsd"),
    "min_lr": to("optim.min_lr"),
}
CHECKPOINTS: dict[str, ConversionRule] = {
    "interval": to("checkpoint.every"),
    "keep_last": to("checkpoint.keep"),
    "keep": to("checkpoint.keep"),
    "keep_interval": to("checkpoint.keep_every"),
    "resume_step": missing("a run goes on from its newest checkpoint"),
    "weights": always("run.output_dir/model holds the weights"),
    "weights_only": always("run.output_dir/model holds the weights"),
}
WANDB: dict[str, ConversionRule] = {
    "project": to("log.wandb_project"),
    "name": to("log.wandb_name"),
    "id": always("a resumed run keeps its own id"),
    "offline": missing("set WANDB_MODE"),
    "shared": always("one process reports"),
    "log_extras": always("samples.jsonl keeps answers of every round"),
}
LORA: dict[str, ConversionRule] = {
    "rank": to("adapter.rank"),
    "alpha": to("adapter.alpha"),
    "dropout": to("adapter.dropout"),
    "target_modules": lora_targets,
    "modules_to_save": train_whole,
}
MODEL: dict[str, ConversionRule] = {
    "name": to("model.path"),
    "seq_len": to("data.sequence_len"),
    "attn": KERNELS,
    "impl": always("there is one implementation"),
    "compile": always("every step is compiled"),
    "ac": by("model.remat")(lambda conversion, value: conversion.set("model.remat", "full")),
    "ac_offloading": missing(),
    "fsdp_cpu_offload": missing(),
    "optim_cpu_offload": to("optim.offload"),
    "cp": to("parallel.context"),
    "tp": to("parallel.tensor"),
    "ep": to("parallel.expert"),
    "dp_replicate": to("parallel.data"),
    "reshard_after_forward": always("weights are gathered a layer at a time"),
    "lora": section("trainer.model.lora", LORA),
    "experimental": section("trainer.model.experimental", {"lora": section("lora", LORA)}),
    "optimization_dtype": to("model.param_dtype"),
    "reduce_dtype": always("gradients are summed in float32"),
    "trust_remote_code": always("foreign code is never run for a model; see docs/extending.md"),
    "tool_call_parser": always("templates and tools are those of section env"),
    "chat_template": missing("model.chat_template is a file with a Jinja template"),
}
LOSS: dict[str, ConversionRule] = {
    "type": to("task.objective", {"default": "grpo", "grpo": "grpo", "gspo": "gspo"}),
    "ratio_type": to("task.ratio", {"token": "token", "sequence": "sequence"}),
    "kl_tau": to("task.beta"),
    "token_mask_high": to("task.importance_max"),
    "token_mask_low": to("task.importance_min"),
    "clip_ratio": to("task.epsilon_high"),
}
TRAINER: dict[str, ConversionRule] = {
    "model": section("trainer.model", MODEL),
    "optim": section("trainer.optim", OPTIM),
    "scheduler": section("trainer.scheduler", SCHEDULER),
    "loss": section("trainer.loss", LOSS),
    "ckpt": section("trainer.ckpt", CHECKPOINTS),
    "wandb": section("trainer.wandb", WANDB),
    "max_steps": to("run.max_steps"),
    "output_dir": to("run.output_dir"),
    "dist_timeout_seconds": to("parallel.meet_timeout"),
    "weight_broadcast": always("rollout.vllm.transport and rollout.vllm.sync say how"),
    "log": always("section log"),
}
SAMPLING: dict[str, ConversionRule] = {
    "max_tokens": to("sampling.max_new_tokens"),
    "max_completion_tokens": to("sampling.max_new_tokens"),
    "temperature": to("sampling.temperature"),
    "top_p": to("sampling.top_p"),
    "top_k": to("sampling.top_k"),
    "min_p": to("sampling.min_p"),
    "seed": to("sampling.seed"),
    "repetition_penalty": missing("log-probs of the policy would no longer be those sampled from"),
    "extra_body": missing(),
}


@by('env.kind = "verifiers" with env.verifiers.taskset and args')
def _environments(conversion: Conversion, value: Any) -> None:
    entries = value if isinstance(value, list) else [value]
    environments = [entry for entry in entries if isinstance(entry, Mapping) and entry.get("id")]
    if len(environments) != 1 or len(environments) != len(entries):
        conversion.miss(
            "each dataset has one environment: data.datasets.N.env, see docs/environments.md"
        )
        return
    (entry,) = environments
    conversion.set("env.kind", "verifiers")
    conversion.set("env.verifiers.taskset", str(entry["id"]).partition("@")[0])
    if isinstance(args := entry.get("args"), Mapping) and args:
        conversion.set("env.verifiers.args", dict(args))
    conversion.log(
        'a taskset of verifiers 0.4; data.datasets are rows {"task": 0}, {"task": 1}, ...'
    )


BUFFER: dict[str, ConversionRule] = {
    "online_difficulty_filtering": by('rollout.zero_advantage = "refill"')(
        lambda conversion, value: (
            conversion.set("rollout.zero_advantage", "refill") if value else None
        )
    ),
    "seed": always("run.seed orders the data"),
}
TRAIN: dict[str, ConversionRule] = {
    "sampling": section("orchestrator.train.sampling", SAMPLING),
    "env": _environments,
    "source": _environments,
}
ORCHESTRATOR: dict[str, ConversionRule] = {
    "batch_size": by("rollout.prompts_per_step x rollout.group_size")(
        lambda conversion, value: conversion.set("batch_size", value)
    ),
    "group_size": to("rollout.group_size"),
    "rollouts_per_example": to("rollout.group_size"),
    "seq_len": to("data.sequence_len"),
    "max_off_policy_steps": to("rollout.max_lag"),
    "max_async_level": to("rollout.max_lag"),
    "max_inflight_rollouts": to("rollout.vllm.concurrency"),
    "max_concurrent": to("rollout.vllm.concurrency"),
    "oversampling_factor": by("rollout.zero_advantage and rollout.max_refill")(
        lambda conversion, value: conversion.miss("more prompts are drawn as they are needed")
    ),
    "sampling": section("orchestrator.sampling", SAMPLING),
    "train": section("orchestrator.train", TRAIN),
    "env": _environments,
    "environment": _environments,
    "eval": missing("[[eval.sets]]"),
    "buffer": section("orchestrator.buffer", BUFFER),
    "renderer": missing("model.chat_template"),
    "use_renderer": missing("model.chat_template"),
    "use_token_client": always("tokens are kept exactly"),
    "trajectory_strategy": always("episodes whose history is rewritten are trees"),
    "client": by("rollout.vllm.servers")(lambda conversion, value: _client(conversion, value)),
    "filters": missing(),
    "log": always("section log"),
    "wandb": section("orchestrator.wandb", WANDB),
    "output_dir": to("run.output_dir"),
    "model": section("orchestrator.model", {"name": to("model.path")}),
    "max_steps": to("run.max_steps"),
    "ckpt": section("orchestrator.ckpt", CHECKPOINTS),
}
DATA: dict[str, ConversionRule] = {
    "name": by("data.datasets")(lambda conversion, value: _dataset(conversion, value)),
    "source": by("data.datasets")(lambda conversion, value: _sources(conversion, value)),
    "seq_len": to("data.sequence_len"),
    "batch_size": by("data.global_batch_size")(
        lambda conversion, value: conversion.set("batch_size", value)
    ),
    "micro_batch_size": to("data.micro_batch_size"),
    "pack_function": always("data.packing"),
    "shuffle": to("data.shuffle"),
    "seed": to("run.seed"),
    "type": always("data.datasets says what is read"),
    "loss_mask": missing("train_on of a dataset"),
}
RULES: dict[str, ConversionRule] = {
    "max_steps": to("run.max_steps"),
    "seq_len": to("data.sequence_len"),
    "output_dir": to("run.output_dir"),
    "max_async_level": to("rollout.max_lag"),
    "async_level": to("rollout.max_lag"),
    "model": section("model", MODEL),
    "data": section("data", DATA),
    "optim": section("optim", OPTIM),
    "scheduler": section("scheduler", SCHEDULER),
    "ckpt": section("ckpt", CHECKPOINTS),
    "wandb": section("wandb", WANDB),
    "trainer": section("trainer", TRAINER),
    "orchestrator": section("orchestrator", ORCHESTRATOR),
    "inference": by("rollout.engine")(
        lambda conversion, value: conversion.log(
            'start vLLM yourself and name it in rollout.vllm.servers with rollout.engine = "vllm";'
            " without, the sampler in the process is used"
        )
    ),
    "deployment": always("start one process a host; see docs/distributed.md"),
    "slurm": always("SLURM's variables are read; see docs/distributed.md"),
    "inference_gpu_ids": missing("rollout.devices sets devices of the trainer aside"),
    "trainer_gpu_ids": missing("CUDA_VISIBLE_DEVICES"),
    "log": always("section log"),
    "val": missing("data.eval_datasets"),
    "eval": missing("[[eval.sets]]"),
    "bench": missing("benchmarks/"),
}


def _dataset(conversion: Conversion, path: Any) -> None:
    conversion.table.setdefault("data", {}).setdefault("datasets", []).append({"path": path})


def _sources(conversion: Conversion, value: Any) -> None:
    for source in value if isinstance(value, list) else [value]:
        if isinstance(source, Mapping) and source.get("dataset"):
            _dataset(conversion, source["dataset"])
        else:
            conversion.miss("a dataset is a file, a folder or a Hub id")


def _client(conversion: Conversion, value: Any) -> None:
    urls = value.get("base_url") if isinstance(value, Mapping) else None
    if urls:
        conversion.set("rollout.engine", "vllm")
        conversion.set(
            "rollout.vllm.servers",
            [url.removesuffix("/v1") for url in (urls if isinstance(urls, list) else [urls])],
        )
