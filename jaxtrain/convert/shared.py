"""Rules that several systems share: trainers built on Hugging Face's use the same names."""

import math
import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from jaxtrain.convert.conversion import Conversion, load_rules

OPTIMIZERS = {
    "lion_pytorch": "lion",
    "optimi_adamw": "adamw",
    **{name: name for name in ("adamw", "schedule_free_adamw", "adafactor", "lion", "muon", "sgd")},
}
ADAMW = re.compile(
    r"(ao_)?(paged_)?adamw(_torch|_hf|_bnb|_apex|_torch_xla|_torch_npu)?(_fused|_(4|8|32)bit)?"
)
LION = re.compile(r"(paged_)?lion(_8bit|_32bit)?")


def _optimizer(conversion: Conversion, value: Any) -> None:
    if value is None:
        return
    name = str(value)
    base = "adamw" if ADAMW.fullmatch(name) else "lion" if LION.fullmatch(name) else None
    base = OPTIMIZERS.get(name, base)
    if base is None:
        conversion.miss(
            f"optim.name here: {', '.join(dict.fromkeys(OPTIMIZERS.values()))}, optax:*"
        )
        return
    conversion.set("optim.name", base)
    for bits in (8, 4):
        if f"{bits}bit" in name:
            conversion.set("optim.moments", f"int{bits}")
    if "paged_" in name:
        conversion.set("optim.offload", True)


def _recompute(conversion: Conversion, value: Any) -> None:
    """Two keys of theirs are one of ours."""
    keys = ("gradient_checkpointing", "activation_offloading")
    recompute, offload = (conversion.source.get(key) for key in keys)
    if offload or recompute in ("unsloth", "offload", "offload_disk"):
        conversion.set("model.remat", "offload")
    elif recompute:
        conversion.set("model.remat", "full")


def _bf16(conversion: Conversion, value: Any) -> None:
    if value in (True, "auto", "full", "true"):
        conversion.set("model.compute_dtype", "bfloat16")
    elif value is False and not conversion.source.get("fp16"):
        conversion.set("model.compute_dtype", "float32")


def _fp16(conversion: Conversion, value: Any) -> None:
    if value is True:
        conversion.set("model.compute_dtype", "bfloat16")
        conversion.log("there is no float16 here; bfloat16 needs no loss scaling")


def _report_to(conversion: Conversion, value: Any) -> None:
    trackers = [] if value is None else value if isinstance(value, list) else [value]
    if "tensorboard" in trackers or "all" in trackers:
        conversion.set("log.tensorboard", True)
    if "wandb" in trackers or "all" in trackers:
        conversion.set("log.wandb_project", conversion.source.get("wandb_project") or "huggingface")
    if unread := [name for name in trackers if name not in ("tensorboard", "wandb", "all", "none")]:
        conversion.miss(f"log.sinks can name a class of your own for {', '.join(map(str, unread))}")


def _resume(conversion: Conversion, value: Any) -> None:
    if value:
        conversion.set("run.resume", "auto")
        conversion.log("a run goes on from the newest checkpoint in its own run.output_dir")


def _max_steps(conversion: Conversion, value: Any) -> None:
    if isinstance(value, int) and value > 0:
        conversion.set("run.max_steps", value)


def _epochs(conversion: Conversion, value: Any) -> None:
    steps = conversion.source.get("max_steps")
    if value and not (isinstance(steps, int) and steps > 0):
        conversion.set("run.num_epochs", value)


def _warmup_steps(conversion: Conversion, value: Any) -> None:
    share = isinstance(value, float) and value < 1
    conversion.set("optim.warmup_ratio" if share else "optim.warmup_steps", value or None)


def _warmup_ratio(conversion: Conversion, value: Any) -> None:
    if not conversion.source.get("warmup_steps"):
        conversion.set("optim.warmup_ratio", value)


def _scheduler_options(conversion: Conversion, value: Any) -> None:
    names = {"min_lr": "optim.min_lr", "min_lr_rate": "optim.min_lr_ratio"}
    for name, number in (value or {}).items():
        if name in names:
            conversion.set(names[name], number)
        else:
            conversion.miss(f"{name}: optim.decay_ratio, optim.wsd_decay or a function of your own")


def _set_steps(name: str, conversion: Conversion, value: Any) -> None:
    """Set NAME.every to a number of steps; a share of the run counts from run.max_steps."""
    total = conversion.source.get("max_steps")
    if isinstance(value, float) and 0 < value < 1 and isinstance(total, int) and total > 0:
        value = math.ceil(value * total)
    if isinstance(value, float) and 0 < value < 1:
        conversion.miss(f"{name}.every counts steps")
    elif value and value > 0:
        conversion.set(f"{name}.every", int(value))


_save_steps, _eval_steps, _logging_steps = (
    partial(_set_steps, name) for name in ("checkpoint", "eval", "log")
)


def _save_strategy(conversion: Conversion, value: Any) -> None:
    if value == "epoch":
        conversion.set("checkpoint.per_epoch", 1)
    elif value == "best":
        conversion.set("checkpoint.best_metric", "eval/loss")
    elif value in (False, "no"):
        conversion.log("the last step always saves a checkpoint, and checkpoint.every others")


def _eval_strategy(conversion: Conversion, value: Any) -> None:
    if value == "epoch":
        conversion.set("eval.per_epoch", 1)
    elif value in (False, "no"):
        conversion.set("eval.every", "never")


EXPERTS = {"gate_up": ["gate", "up"], "gate": ["gate"], "up": ["up"], "down": ["down"]}
LINEARS = (
    *(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "out_proj")),
    *(f"self_attn.{name}" for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")),
    *(f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")),
    *(f"mlp.shared_experts.{name}" for name in ("gate_proj", "up_proj", "down_proj")),
    *(f"linear_attn.{name}" for name in ("in_proj_qkv", "in_proj_z", "out_proj")),
)
"""Matrices of a layer that an expression for PEFT's target_modules is tried on."""
ROOTS = ("model.", "model.language_model.", "language_model.model.", "model.text_model.", "")


def lora_targets(conversion: Conversion, value: Any) -> None:
    """Name the matrices; a text is an expression over whole names, as PEFT has it."""
    if value in (True, "all-linear", "all", ["all-linear"]):
        conversion.set("adapter.target", "all-linear")
    elif isinstance(value, str) and re.search(r"[\\()\[*|^$]", value):
        names, everywhere = match_linears(value)
        conversion.set("adapter.target", names or None)
        if not names:
            conversion.miss("adapter.target has names, with * for any part; none fits a layer")
        else:
            conversion.log("the expression's matrices of the text model, by their names")
        if names and not everywhere:
            # Always an expression here, too: with * alone it would be a pattern of names.
            conversion.set("adapter.target", [f"({value})"])
    elif value:
        conversion.set("adapter.target", value)


def lora_layers(conversion: Conversion, value: Any) -> None:
    """Refuse what numbers no layers; `finish_adapter` puts numbers into the targets."""
    if value is not None and _layer_numbers(value) is None:
        conversion.miss("adapter.target takes numbers of layers: layers.(3|7)")


def _layer_numbers(value: Any) -> list[int] | None:
    """Return the layers of PEFT's layers_to_transform; None for anything else."""
    numbers = value if isinstance(value, list) else [value]
    return numbers if all(type(number) is int and number >= 0 for number in numbers) else None


def match_linears(expression: str) -> tuple[list[str], bool]:
    """Return names of the matrices that an expression has in a layer, and whether it has the same
    ones in all layers."""
    try:
        pattern = re.compile(expression[:1000])
    except re.error:
        return [], False
    for root in ROOTS:
        layers = [
            [name for name in LINEARS if pattern.fullmatch(f"{root}layers.{layer}.{name}")]
            for layer in range(128)
        ]
        if any(layers):
            matched = dict.fromkeys(name.rpartition(".")[2] for names in layers for name in names)
            return list(matched), all(names == layers[0] for names in layers)
    return [], False


def _lora_parameters(conversion: Conversion, value: Any) -> None:
    for name in value or []:
        if not expert_targets(name):
            conversion.miss(f"{name!r}: of parameters, only experts' matrices have adapters here")


def expert_targets(name: Any) -> list[str]:
    """Return adapter.target's names of a parameter of experts."""
    *_, owner, part = ["", "", *str(name).split(".")]
    matrices = EXPERTS.get(part.removesuffix("_proj"), []) if owner in ("experts", "") else []
    return [f"experts.{matrix}" for matrix in matrices]


def train_whole(conversion: Conversion, value: Any) -> None:
    """Train embeddings and head in full."""
    names = {"embed_tokens": "adapter.train_embeddings", "lm_head": "adapter.train_head"}
    for name in value or []:
        if name in names:
            conversion.set(names[name], True)
        else:
            conversion.miss(f"{name!r}: only embed_tokens and lm_head can be trained in full")


def load_4bit(conversion: Conversion, value: Any) -> None:
    """Quantize the base to nf4; whole tensors of experts where the source asks for that."""
    if value == "fp4":
        conversion.miss('adapter.quantize = "nf4"')
    elif value is True:
        fused = conversion.source.get("quantize_moe_experts")
        conversion.set("adapter.quantize", "nf4_fused" if fused else "nf4")


def push(conversion: Conversion, value: Any) -> None:
    """Convert all keys about pushing to the Hub to the observer `hub`."""
    if not value:
        return
    source = conversion.source
    repo = source.get("hub_model_id")
    if repo is None:
        repo = str(source.get("output_dir") or "model").rstrip("/").rpartition("/")[2]
        conversion.log(f"the repository is called {repo!r}, by output_dir")
    strategy = source.get("hub_strategy") or "every_save"
    strategies = ("end", "every_save", "checkpoint", "all_checkpoints")
    options = {"repo": repo, "strategy": strategy if strategy in strategies else "end"}
    if source.get("hub_private_repo") is False:
        options["private"] = False
    if source.get("hub_revision"):
        options["branch"] = source["hub_revision"]
    conversion.set("observers", [{"kind": "hub", "options": options}])


TRAINER = load_rules("shared", globals())
"""Keys of Hugging Face's trainers."""


def finish(conversion: Conversion) -> None:
    """Apply what follows from several keys together."""
    finish_adapter(conversion)
    finish_evaluation(conversion)
    finish_epochs(conversion)
    scheduler = conversion.source.get("lr_scheduler_type", conversion.source.get("lr_scheduler"))
    if scheduler == "constant":  # theirs has no warm-up; constant_with_warmup has
        for key in ("optim.warmup_steps", "optim.warmup_ratio"):
            if conversion.remove(key):
                conversion.drop("a constant rate has no warm-up there", key.partition(".")[2])
    if conversion.get("rollout.engine") == "vllm" and conversion.get("adapter.kind") == "lora":
        conversion.set("rollout.vllm.sync", "lora")


def finish_adapter(conversion: Conversion) -> None:
    """Complete section adapter, or remove what is left of one that is not used."""
    if conversion.get("adapter.quantize") and not conversion.get("adapter.kind"):
        conversion.set("adapter.kind", "lora")
    if parameters := conversion.source.get("lora_target_parameters"):
        targets = conversion.get("adapter.target") or []
        names = [targets] if isinstance(targets, str) else list(targets)
        for parameter in parameters if isinstance(parameters, list) else ():
            names += [name for name in expert_targets(parameter) if name not in names]
        conversion.set("adapter.target", names or None)
    if numbers := _layer_numbers(conversion.source.get("peft_layers_to_transform")):
        targets = conversion.get("adapter.target") or "all-linear"
        layers = rf"layers\.({'|'.join(map(str, numbers))})\."
        names = [targets] if isinstance(targets, str) else targets
        ends = [".*" if name == "all-linear" else rf"(.*\.)?{name}" for name in names]
        conversion.set("adapter.target", [layers + end for end in ends])
    if conversion.get("adapter") and not conversion.get("adapter.kind"):
        for key in conversion.remove("adapter"):
            conversion.drop("without an adapter it has no effect", f"adapter.{key}")


def train_vision(conversion: Conversion, *parts: str) -> None:
    """Train parts for images, "tower" or "projector", beside the text: in full, or with an adapter
    that is on all matrices."""
    if not conversion.get("adapter.kind"):
        train = "all" if "tower" in parts else "projector" if parts else None
        conversion.set("model.vision.train", train)
    elif conversion.get("adapter.target") == "all-linear" and parts:
        conversion.set("adapter.target", ["all-linear", *parts])
    elif parts and isinstance(conversion.get("adapter.target"), list):
        text = 'names are those of the text; "tower" and "projector" add the parts for images'
        conversion.log(text, "adapter.target")


def finish_evaluation(conversion: Conversion) -> None:
    """Remove evaluations without data, and give early stopping its metric."""
    if conversion.get("task.kind") == "rl":
        for key in ("data.validation_split", "data.eval_datasets"):
            if conversion.remove(key):
                conversion.log("held-out prompts are [[eval.sets]], answered and rewarded", key)
    for name in ("eval", "checkpoint"):
        if conversion.get(f"{name}.per_epoch") == 0:
            conversion.remove(f"{name}.per_epoch")
            conversion.set("eval.every", "never" if name == "eval" else None)
    data = ("data.eval_datasets", "data.validation_split", "eval.sets")
    if not any(conversion.get(key) for key in data):
        keys = ("eval.every", "eval.per_epoch", "eval.at_start", "eval.patience")
        for key in (*keys, "checkpoint.best_metric", "checkpoint.best_mode"):
            if conversion.get(key) != "never" and conversion.remove(key):
                conversion.drop("there is nothing to evaluate, as no data are held out", key)
    if conversion.get("eval.patience") and not conversion.get("checkpoint.best_metric"):
        conversion.set("checkpoint.best_metric", "eval/loss")
    if conversion.get("eval.every") == "never":
        for key in ("eval.per_epoch", "eval.at_start", "eval.patience", "checkpoint.best_metric"):
            if conversion.remove(key):
                conversion.drop("nothing is evaluated", key)


def finish_epochs(conversion: Conversion) -> None:
    """Count in steps what is due so often in an epoch, where steps end the run."""
    total = conversion.get("run.max_steps")
    for name in ("checkpoint", "eval"):
        often = conversion.get(f"{name}.per_epoch")
        if not total or not often:
            continue
        conversion.remove(f"{name}.per_epoch")
        steps = math.ceil(total / (often * (conversion.source.get("num_epochs") or 1)))
        conversion.set(f"{name}.every", max(steps, 1))
        conversion.log("of run.max_steps, as if they were all epochs", f"{name}.every")


def finish_round(conversion: Conversion, per_device: Any, devices: Any = 1) -> None:
    """Set the size of a round of reinforcement learning from the numbers of answers of a microstep.

    per_device: answers of a device in a microstep. devices: how many, as far as that is known. The
    source's own keys say how many microsteps a step and a generation have.
    """
    source = {**conversion.source, **(conversion.source.get("trl") or {})}
    step = int(per_device or 1) * int(devices or 1)
    drawn = source.get("generation_batch_size") or step * (source.get("steps_per_generation") or 0)
    step *= conversion.remove("optim.gradient_accumulation_steps") or 1
    conversion.remove("data.global_batch_size")
    group = conversion.get("rollout.group_size") or 8
    conversion.set("rollout.group_size", group)
    minibatches = max(drawn // step, 1)
    conversion.set("task.num_minibatches", minibatches if minibatches > 1 else None)
    conversion.set("rollout.prompts_per_step", math.ceil(step / group) * minibatches)
    rounded = ", rounded to whole groups" if step % group else ""
    if drawn > step and drawn % step:
        rounded += f"; the {drawn} of a generation are no whole number of steps, which is rounded"
    unread = "per_device_train_batch_size"  # its note is about rows of texts
    conversion.notes = [note for note in conversion.notes if note[0] != unread]
    text = f"{step} answers a step of {devices} device(s), {group} to a prompt{rounded}"
    conversion.log(text, "rollout.prompts_per_step")


def finish_sampling(conversion: Conversion) -> None:
    """Remove what cuts the distribution of a policy, and give prompts room beside answers."""
    for key, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)):
        value = conversion.remove(f"sampling.{key}")
        if value not in (None, off):
            why = "log-probs would not be the policy's; answers are drawn from all tokens"
            conversion.missed.append((key, value, why))
    longest = conversion.get("sampling.max_new_tokens") or 0
    length = conversion.get("data.sequence_len") or 2048
    if isinstance(longest, int) and longest >= length:
        conversion.set("data.sequence_len", longest + 1024)
        conversion.log("prompt and answer together: 1,024 tokens for prompts", "data.sequence_len")


def listed(value: Any) -> Iterator[Any]:
    """Yield the entries of a list, or one value by itself; nothing for None."""
    if isinstance(value, str | Mapping):
        yield value
    else:
        yield from value or ()
