"""TRL's command lines (`trl dpo --model_name_or_path ...`) and its YAML files."""

import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from jaxtrain.convert.conversion import Conversion, load_rules
from jaxtrain.convert.shared import (
    TRAINER,
    finish,
    finish_round,
    finish_sampling,
    listed,
    train_vision,
)
from jaxtrain.errors import UserError
from jaxtrain.text_safety import show

METHODS = (
    *("sft", "dpo", "kto", "grpo", "rloo", "reward", "cpo", "orpo", "gkd", "distillation"),
    *("online_dpo", "prm"),
)
FOLDERS = ("examples/scripts/", "trl/scripts/")
"""TRL's own, whose scripts are named by their methods."""
LOSSES = (
    *("sigmoid", "hinge", "ipo", "robust", "exo_pair", "nca_pair", "bco_pair", "sppo_hard", "aot"),
    *("aot_unpaired", "apo_zero", "apo_down", "discopop", "sigmoid_norm", "sft", "kto", "simpo"),
    *("apo_zero_unpaired", "orpo", "cpo"),
)

KEYS_OF_METHOD = ("command", "loss_type", "launcher", "vlm")

DEFAULTS: dict[str, dict[str, Any]] = {
    "sft": {"learning_rate": 2e-5, "max_length": 1024, "packing": False},
    "dpo": {"learning_rate": 1e-6, "max_length": 1024, "beta": 0.1},
    "kto": {"learning_rate": 1e-6, "max_length": 1024, "beta": 0.1},
    "reward": {"learning_rate": 1e-4, "max_length": 1024},
    "grpo": {"learning_rate": 1e-6, "beta": 0.0, "num_generations": 8, "loss_type": "dapo"},
    "rloo": {"learning_rate": 1e-6, "beta": 0.05, "num_generations": 2},
    "distillation": {"learning_rate": 1e-6, "beta": 1.0},
    "gkd": {
        **{"learning_rate": 2e-5, "max_length": 1024, "packing": False, "max_new_tokens": 128},
        **{"beta": 0.5, "lmbda": 0.5, "temperature": 0.9},
    },
}
"""What TRL takes where a line says nothing, and this project would take something else."""
COMMON_DEFAULTS = {
    "num_train_epochs": 3.0,
    "per_device_train_batch_size": 8,
    "lr_scheduler_type": "linear",
    "gradient_checkpointing": True,
}
SAMPLING_DEFAULTS = {"max_completion_length": 512, "temperature": 1.0}
SAMPLED = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "seed", "stop")},
    **dict.fromkeys(("max_tokens", "max_new_tokens"), "max_new_tokens"),
}
"""Keys of generation_kwargs that section sampling has, by their names there."""
NOT_SENT = (
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "logprobs", "stop_token_ids"),
    *("prompt_logprobs", "detokenize", "n", "structured_outputs", "guided_decoding"),
)
"""Keys of generation_kwargs that every request has fixed values of, or none."""


def _rewards(conversion: Conversion, value: Any) -> None:
    source = {**(conversion.source.get("trl") or {}), **conversion.source}
    rewards: list[dict[str, Any]] = [{"function": str(name)} for name in listed(value)]
    for reward, weight in zip(rewards, listed(source.get("reward_weights")), strict=False):
        reward["weight"] = float(weight)
    conversion.set("rewards", rewards)
    conversion.log('your own functions are "file.py:name" or "package.module:name"; see docs/rl.md')


GRPO = load_rules("grpo", globals())
"""Sampling and objective; Axolotl's section `trl` has the same."""
RULES = {**TRAINER, **GRPO, **load_rules("trl", globals())}
"""Every key that is known."""


def detect(table: Mapping[str, Any]) -> bool:
    """Return whether a table looks like this system's."""
    return "model_name_or_path" in table or "dataset_name" in table


def parse_command(text: str) -> dict[str, Any]:
    """Return a command line as a table: its flags, under `command` the method, and under `launcher`
    the flags of what starts it, such as `accelerate launch`. ValueError for an open quote."""
    lines = [shlex.split(line, comments=True) for line in text.replace("\\\n", " ").splitlines()]
    words = next((words for words in lines if _find_script(words) is not None), None)
    if words is None:
        first = " ".join(next((words for words in lines if words), [])).partition(" --")[0]
        raise UserError(
            f"{show(first[:80])}: a TRL command names what it runs, as in `trl dpo"
            f" --model_name_or_path ...`; known are {', '.join(METHODS)}"
        )
    script = _find_script(words)
    assert script is not None
    end = next(
        (i for i, word in enumerate(words) if word in ("&&", "||", "|", ">", "&", ";")), None
    )
    table = _read_flags(words[script + 1 : end])
    method = _method(words[script])
    return {
        "command": method or _guess_method(table),
        **({"vlm": True} if "vlm" in words[script] else {}),
        **({"launcher": launcher} if (launcher := _read_flags(words[:script])) else {}),
        **table,
    }


def _find_script(words: Sequence[str]) -> int | None:
    """Position of `dpo` in `trl dpo`, or of a script that trains; None if there is none."""
    for index, word in enumerate(words):
        named = word.endswith(".py") or word.startswith("trl.")  # python -m trl.scripts.sft
        if word in METHODS or (named and _method(word)):
            return index
        if word.endswith(".py") and any(
            w.startswith("--model_name_or_path") for w in words[index:]
        ):
            return index
    return None


def _method(word: str) -> str | None:
    """Return the method in a script's name, dpo of trl/scripts/dpo.py or train_dpo.py; of another
    script of TRL's own its whole name, else None."""
    name = word.rpartition("/")[2].removesuffix(".py")
    parts = [name, *re.split(r"[^a-z]", name.lower())]
    script = name if any(folder in word for folder in FOLDERS) else None
    return next((part for part in parts if part in METHODS), script)


def _guess_method(table: Mapping[str, Any]) -> str:
    """Return the method that the keys alone suggest."""
    if "teacher_model_name_or_path" in table:
        return "distillation"
    return "grpo" if "reward_funcs" in table else "sft"


def _read_flags(words: Sequence[str]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    key = None
    for word in words:
        if word.startswith("--no_"):
            table[word[5:].replace("-", "_")], key = False, None
        elif word.startswith("--"):
            key, equals, value = word[2:].partition("=")
            key = key.replace("-", "_")
            table[key] = _scalar(value) if equals else True
        elif key is not None:
            old, new = table[key], _scalar(word)
            table[key] = new if old is True else [*(old if isinstance(old, list) else [old]), new]
    return table


def _scalar(word: str) -> Any:
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


def convert(table: Mapping[str, Any]) -> Conversion:
    """Their config in ours; `command` says which trainer, else the keys do."""
    method = str(table.get("command") or _guess_method(table))
    sampling = SAMPLING_DEFAULTS if method in ("grpo", "rloo", "distillation") else {}
    settings = {**COMMON_DEFAULTS, **DEFAULTS.get(method, {}), **sampling, **table}
    drawn = bool(sampling or (method == "gkd" and settings["lmbda"]))
    conversion = Conversion(settings)
    set_task(conversion, method, settings.get("loss_type"))
    if conversion.get("task.kind") in ("preference", "reward_model"):
        conversion.set("data.packing", False)  # a pair a row, as batches count them
    conversion.run(RULES, {k: v for k, v in settings.items() if k not in KEYS_OF_METHOD})
    conversion.attempt(_set_datasets, *([_finish_rounds] if drawn else []), finish)
    if settings.get("vlm"):
        conversion.images = "command"
        train_vision(conversion, "tower", "projector")
    return conversion


def _finish_rounds(conversion: Conversion) -> None:
    """Set servers and the size of a round."""
    settings = conversion.source
    set_servers(conversion, settings)
    launcher = settings.get("launcher") or {}
    devices = launcher.get("num_processes") or launcher.get("nproc_per_node") or 1
    finish_round(conversion, conversion.remove("data.micro_batch_size"), devices)
    if settings.get("max_prompt_length"):
        length = settings["max_prompt_length"] + settings["max_completion_length"]
        conversion.set("data.sequence_len", length)
    finish_sampling(conversion)


def _set_datasets(conversion: Conversion) -> None:
    """Set the dataset that the flags are about, and its held-out split."""
    settings = conversion.source
    keys = {
        "path": settings.get("dataset_name"),
        "name": settings.get("dataset_config"),
        "split": settings.get("dataset_train_split"),
        "streaming": settings.get("dataset_streaming"),
    }
    column = settings.get("dataset_text_field", "text")
    keys["fields"] = {"text": column} if column != "text" else None
    # TRL: all tokens of conversations and texts, the completion alone of a prompt with one.
    if (assistant := settings.get("assistant_only_loss")) is not None:
        keys["train_on"] = "assistant" if assistant else "all"
    if (completion := settings.get("completion_only_loss")) is not None and not assistant:
        keys["train_on"] = "assistant" if completion else "all"
    dataset = {key: value for key, value in keys.items() if value is not None}
    if not dataset:
        return
    if settings.get("command") == "sft" and "train_on" not in dataset:
        text = "TRL trains all tokens of conversations, here the assistant's; see its train_on"
        conversion.log(text, "dataset_name")
    conversion.set("data.datasets", [dataset])
    if settings.get("eval_strategy", "no") not in ("no", False):
        split = settings.get("dataset_test_split", "test")
        conversion.set("data.eval_datasets", [{**dataset, "split": split}])


def _set_generation(conversion: Conversion, kwargs: Any) -> None:
    """Set sampling parameters, which there replace those of other keys."""
    for name, value in (json.loads(kwargs) if isinstance(kwargs, str) else kwargs).items():
        key = f"generation_kwargs.{name}"
        if name in SAMPLED:
            conversion.set(
                f"sampling.{SAMPLED[name]}", list(listed(value)) if name == "stop" else value
            )
        elif name in NOT_SENT:
            why = "log-probs would not be the policy's, or section sampling has it"
            conversion.missed.append((key, value, why))
        elif conversion.get("rollout.engine") == "vllm":
            conversion.set(f"rollout.vllm.{key}", value)
        else:
            why = "the sampler in the process draws as section sampling says"
            conversion.missed.append((key, value, why))


def set_servers(conversion: Conversion, settings: Mapping[str, Any]) -> None:
    """Set the servers of a run that samples with vLLM; beside the trainer they are its own."""
    _set_generation(conversion, settings.get("generation_kwargs") or {})
    if conversion.get("rollout.engine") != "vllm":
        conversion.remove("rollout.vllm")
        return
    host, port = (settings.get(f"vllm_server_{name}") for name in ("host", "port"))
    named = settings.get("vllm_server_base_url") or host or port
    if settings.get("vllm_mode", "colocate") == "server" or named:
        url = f"http://{host or '127.0.0.1'}:{port or 8000}"
        conversion.set("rollout.vllm.servers", [settings.get("vllm_server_base_url") or url])
    else:
        conversion.set("rollout.vllm.launch", "local")
        conversion.log("a server that the run starts (rollout.vllm.launch)", "use_vllm")


def set_task(conversion: Conversion, method: str, loss: Any) -> None:
    """Set section task of a trainer."""
    if method in ("grpo", "rloo"):
        conversion.set("task.kind", "rl")
        conversion.set("task.objective", method)
        if loss and method == "grpo":
            conversion.run(GRPO, {"loss_type": loss})
    elif method in ("dpo", "kto", "orpo", "cpo"):
        conversion.set("task.kind", "preference")
        names = [{"aot_pair": "aot"}.get(name, name) for name in listed(loss or None)]
        if unknown := [name for name in names if name not in LOSSES]:
            conversion.missed.append(("loss_type", unknown, f"task.loss is {', '.join(LOSSES)}"))
        names = [name for name in names if name in LOSSES] or [
            {"dpo": "sigmoid"}.get(method, method)
        ]
        conversion.set("task.loss", names[0] if len(names) == 1 else names)
    elif method in ("reward", "prm"):
        conversion.set("task.kind", "reward_model")
        conversion.set("task.labels", "steps" if method == "prm" else None)
    elif method in ("gkd", "distillation"):
        conversion.set("task.kind", "distillation")
        if method == "distillation":
            conversion.set("task.on_policy_share", 1.0)
            # GKD's is that of the answers alone: its trainer compares logits at 1.
            conversion.set("task.temperature", conversion.source.get("temperature"))
        if conversion.source.get("lmbda", 1.0):
            conversion.set("rollout.group_size", 1)
    elif method != "sft":
        conversion.set("task.kind", method)
        conversion.missed.append(("command", method, "see docs/reference/config.md for the tasks"))
    elif loss not in (None, "nll"):
        conversion.missed.append(("loss_type", loss, "the loss of SFT is the tokens' likelihood"))
