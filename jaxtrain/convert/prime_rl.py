"""prime-rl's TOML, `rl.toml` and `sft.toml`, with the names of several versions."""

from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

from jaxtrain.convert import shared
from jaxtrain.convert.conversion import Conversion, load_rules
from jaxtrain.convert.prime_rl_sources import (
    KEYS_OF_EVALUATION,
    environment,
    refills,
    set_evaluation,
)
from jaxtrain.convert.shared import finish, finish_sampling, listed
from jaxtrain.errors import UserError

SECTIONS = ("orchestrator", "trainer", "inference", "deployment", "source", "vllm")
WINDOW = 8192
"""Tokens of an evaluation's episode beside one answer; there the server's limit bounds it."""
SERVER = (
    "[vllm] stands in the file of an inference server, which trains nothing: start `vllm serve`"
    " with its options, and name the server in rollout.vllm.servers of a run"
)
METHODS = {
    "sft": "write the teacher's answers with jaxtrain generate --input, and train on them",
    "opsd": "a teacher reads what the student reads; see task.kind distillation with task.teacher",
    "several": "a run has one task; give each algorithm a run over its sources",
}
"""Algorithms without a counterpart, and what is nearest here."""
CUSTOM_METHOD = (
    "task.objective and task.baseline are nearest; a method of your own: docs/extending.md"
)
COLUMNS = ("messages", "prompt", "completion", "tools")
STANDSTILL = 1e-30
"""A learning rate so small that every weight is rounded to what it was."""
ROWS = "PrimeIntellect/Reverse-Text-SFT"
"""The dataset that prime-rl takes where section data names none."""
DEFAULTS = {
    "optim.learning_rate": 1e-6,
    "optim.weight_decay": 0.01,
    "optim.lr_scheduler": "constant",
}
"""What prime-rl takes where a file says nothing, and this project would take something else."""


def detect(table: Mapping[str, Any]) -> bool:
    """Return whether a table looks like this system's."""
    model = table.get("model")
    is_prime_rl = isinstance(model, Mapping) and "name" in model
    return any(name in table for name in SECTIONS) or (
        is_prime_rl and any(name in table for name in ("data", "train"))
    )


def convert(table: Mapping[str, Any]) -> Conversion:
    """Their config in ours."""
    table = without_none(table)
    if isinstance(table.get("vllm"), Mapping):
        raise UserError(SERVER)
    if evaluates := "source" in table:
        table = as_run(table)
    if "orchestrator" not in table and "train" in table:
        table = as_one(table)
    if renderer := _section(table, "inference").get("renderer"):
        table = {"renderer": renderer, **table}
    conversion = Conversion(table)
    if evaluates:
        conversion.log("jaxtrain eval --config FILE answers eval.sets; nothing trains", "source")
    orchestrator = table.get("orchestrator")
    if drawn := isinstance(orchestrator, Mapping):
        conversion.set("task.kind", "rl")
        conversion.set("sampling.temperature", 1.0)
    for key, value in DEFAULTS.items():
        conversion.set(key, value)
    conversion.run(RULES, table)
    if not conversion.get("run.max_steps"):
        conversion.set("run.max_steps", 1_000_000)
        conversion.log("unset: there a run goes on until it is stopped", "max_steps")
    if conversion.get("adapter"):
        conversion.table["adapter"].setdefault("kind", "lora")
    if not conversion.get("optim.learning_rate"):
        conversion.set("optim.learning_rate", STANDSTILL)
        conversion.log(
            "0 there; steps of this size change no weight that is not 0", "optim.learning_rate"
        )
    if not conversion.get("model.path"):
        conversion.log("unset; name its file first: jaxtrain convert MODEL.toml THIS.toml", "model")
    conversion.attempt(_finish_rounds if drawn else _set_data, set_evaluation, finish, _set_vision)
    return conversion


def _section(table: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the table under a key; an empty one where there is none."""
    value = table.get(name)
    return value if isinstance(value, Mapping) else {}


def as_run(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the file of an evaluation as that of a run over the same sources."""
    evaluation = {key: table[key] for key in table if key in KEYS_OF_EVALUATION}
    sampling = _section(evaluation, "sampling")
    tokens = sampling.get("max_completion_tokens") or sampling.get("max_tokens") or 0
    if not isinstance(tokens, int):
        tokens = 0  # the loader refuses it as max_new_tokens of eval.sets
    train = {"source": table["source"], "sampling": {"max_tokens": tokens}, "group_size": 8}
    model = {"model": {"name": table["model"]}} if isinstance(table.get("model"), str) else {}
    return {
        **{key: value for key, value in table.items() if key not in evaluation},
        **{"max_steps": 1, "seq_len": WINDOW + tokens, **model},
        "orchestrator": {"eval": evaluation, "train": train},
    }


def as_one(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the files of an orchestrator and its trainer as one of a whole run."""
    server = ("address", "env") if "address" in table else ()
    parts: dict[str, dict[str, Any]] = {"orchestrator": {}, "trainer": {}}
    run: dict[str, Any] = {}
    for key, value in table.items():
        rule = RULES.get(key)
        owners = [name for name in parts if key in (RULES[name].inner or {})]
        owner = next(iter(owners), None) if rule is None or rule.inner is None else None
        if key not in server:
            (parts[owner] if owner else run)[key] = value
    return {**run, **parts}


def without_none(value: Any) -> Any:
    """Remove entries "None", which TOML has no other word for."""
    if isinstance(value, Mapping):
        return {k: without_none(v) for k, v in value.items() if v != "None"}
    return [without_none(entry) for entry in value] if isinstance(value, list) else value


def _finish_rounds(conversion: Conversion) -> None:
    """Set the size of rounds, their length, the objective and the environments."""
    orchestrator = conversion.source["orchestrator"]
    train = orchestrator.get("train") or {}
    group = conversion.get("rollout.group_size") or 1
    if group == 1:
        conversion.log("one answer has nothing to be compared with: 8", "orchestrator.group_size")
        group = 8
    batch = orchestrator.get("batch_size") or 128
    prompts = max(1, batch // group)
    conversion.set("rollout.group_size", group)
    conversion.set("rollout.prompts_per_step", prompts)
    trainer = _section(_section(conversion.source, "trainer"), "model")
    lengths = (
        conversion.source.get("seq_len"),
        orchestrator.get("seq_len"),
        trainer.get("seq_len"),
    )
    length = next(filter(None, lengths), 2048)
    conversion.set("data.sequence_len", length)
    if (conversion.get("sampling.max_new_tokens") or length) >= length:
        conversion.set("sampling.max_new_tokens", max(length - length // 8, 1))
        text = f"answers up to seq_len {length} there; an eighth is left to prompts"
        conversion.log(text, "sampling.max_new_tokens")
    finish_sampling(conversion)
    if conversion.get("rollout.max_lag") is not None:
        conversion.set("rollout.mode", "async" if conversion.remove("rollout.max_lag") else "sync")
        lags = [orchestrator.get(name) for name in ("max_off_policy_steps", "max_async_level")]
        lags += [conversion.source.get(name) for name in ("max_async_level", "async_level")]
        if conversion.get("rollout.mode") == "async":
            conversion.set("rollout.max_lag", next(filter(None, lags)))
    if conversion.get("rollout.engine") != "vllm" and conversion.remove("rollout.vllm"):
        conversion.drop("the sampler in the process has its own limits", "concurrency")
    keys = ("source", "env", "environment")
    tables = (train, orchestrator)
    entries = [entry for table in tables for key in keys for entry in listed(table.get(key))]
    algorithm = train.get("algo") or orchestrator.get("algo") or {}
    algorithms = [entry.get("algo") or algorithm for entry in entries] or [algorithm]
    if any(algorithm != algorithms[0] for algorithm in algorithms):
        algorithms = [{"type": "several"}]
    if not _set_algorithm(conversion, algorithms[0]):
        return
    if entries and all(map(refills, entries)):
        conversion.set("rollout.zero_advantage", "refill")
        entries = [{k: v for k, v in entry.items() if k != "curriculum"} for entry in entries]
    datasets = []
    for entry in entries:
        rows = entry.get("num_tasks") or entry.get("num_examples")
        dataset = {"path": "builtin:tasks", "options": {"num_rows": rows or prompts}}
        if entry.get("ratio"):
            dataset["weight"] = entry["ratio"]
        datasets.append(dataset | {"env": environment(conversion, entry)})
    if len(datasets) == 1:
        conversion.set("env", datasets[0].pop("env"))
    conversion.set("data.datasets", datasets or None)
    if datasets:
        text = "rows are numbers of tasks; set options.num_rows to how many the taskset has"
        conversion.log(text, "data.datasets")
    else:
        text = "unset; name its file as well: jaxtrain convert THIS.toml ENVIRONMENT.toml"
        conversion.log(text, "orchestrator.train.source")


def _set_algorithm(conversion: Conversion, algorithm: Mapping[str, Any]) -> bool:
    """Set section task: rewards less their group's mean, over all tokens; or a teacher. Return
    whether the policy draws answers."""
    name = algorithm.get("type") or algorithm.get("id") or "grpo"
    loss = _section(_section(conversion.source, "trainer"), "loss").get("type")
    if name in ("opd", "on_policy_distillation"):
        teacher = algorithm.get("teacher") or {}
        url = next(listed(teacher.get("base_url")), None)
        conversion.table["task"] = {"kind": "distillation", "on_policy_share": 1.0, "beta": 1.0}
        conversion.set("task.teacher.path", teacher.get("name"))
        if url:
            conversion.set("task.teacher.kind", "server")
            conversion.set("task.teacher.url", url.removesuffix("/v1"))
            conversion.set("task.top_k", 20)
        return True
    if loss == "sft" and name != "dataset_sft":
        name = "sft"
    if name in ("sft", "dataset_sft"):
        for key in ("rollout", "sampling", "task"):
            conversion.remove(key)
        of_answers = ("orchestrator.group_size", "sampling.max_new_tokens")
        conversion.notes = [note for note in conversion.notes if note[0] not in of_answers]
        path = (algorithm.get("dataset") or {}).get("name")
        conversion.set("data.datasets", [{"path": path}] if path else None)
        tokens = conversion.source["orchestrator"].get("token_batch_size") or 0
        rows = tokens // conversion.get("data.sequence_len")
        conversion.set("data.global_batch_size", rows or None)
    elif name not in ("grpo", "default", "max_rl"):
        conversion.table["task"] = {"kind": name}
    if name == "dataset_sft":
        return False
    if name not in ("grpo", "default", "max_rl"):
        reason = METHODS.get(name, CUSTOM_METHOD)
        conversion.missed.append(("orchestrator.algo.type", name, reason))
        return False
    if conversion.get("task.importance_max") or conversion.get("task.importance_min"):
        conversion.set("task.importance_correction", "token_mask")
    conversion.set("task.objective", conversion.get("task.objective") or "grpo")
    conversion.set("task.average", "token")
    conversion.set("task.scale_rewards", "mean" if name == "max_rl" else "none")
    return True


def _loss_type(conversion: Conversion, value: Any) -> None:
    if value == "gspo":
        conversion.set("task.ratio", "sequence")
    elif value not in ("default", "grpo", "sft"):
        conversion.set("task.objective", value)
        conversion.miss("task.objective has the losses that there are")


def _sign_descent(conversion: Conversion, value: Any) -> None:
    """Set the optimizer; lion without momentum descends by the sign of the gradient."""
    names = {name: name for name in ("adamw", "muon", "sgd")} | {"sign_sgd": "lion"}
    if value not in names:
        conversion.miss(f"optim.name here; converted are {', '.join(names)}")
        return
    conversion.set("optim.name", names[value])
    if value == "sign_sgd":
        conversion.set("optim.beta1", 0.0)
        conversion.log("lion with beta1 0, whose steps are the gradient's signs")


def _offload(conversion: Conversion, value: Any) -> None:
    if value not in (False, None):
        conversion.set("optim.offload", True)


def _recompute(conversion: Conversion, value: Any) -> None:
    if value not in (False, None) and conversion.get("model.remat") != "offload":
        conversion.set("model.remat", "full")


def _offload_inputs(conversion: Conversion, value: Any) -> None:
    if value not in (False, None):
        conversion.set("model.remat", "offload")


def _set_data(conversion: Conversion) -> None:
    """Turn the data of supervised fine-tuning into datasets."""
    data = conversion.source.get("data")
    if not isinstance(data, Mapping):
        return
    columns = {key: value for key, value in _section(data, "columns").items() if key in COLUMNS}
    name, fake = data.get("name"), data.get("type") == "fake"
    sources = [
        {**source} if isinstance(source, Mapping) else {} for source in listed(data.get("source"))
    ]
    pairs = zip_longest(data.get("subsets") or [None], data.get("splits") or [None])
    if not sources or (name and all("dataset" in source for source in sources)):
        sources += [{"dataset": name, "subset": subset, "split": split} for subset, split in pairs]
    if data.get("type") not in (None, "sft", "fake"):
        conversion.missed.append(("data.type", data["type"], "data.datasets says what is read"))
    datasets: list[dict[str, Any]] = []
    for source in sources:
        if fake or source.get("type") == "fake":
            conversion.log("made up there; here questions that the project makes up", "data.type")
            datasets.append({"path": "builtin:calculator", "options": {"num_rows": 10_000}})
            continue
        path = source.get("dataset") or name
        if path is None:
            conversion.log(f"{ROWS}, which is read there where none is named", "data.name")
        dataset = {"path": path or ROWS, "name": source.get("subset"), "split": source.get("split")}
        fields = {field: column for field, column in columns.items() if field != column}
        dataset["fields"] = fields or None
        datasets.append({key: value for key, value in dataset.items() if value is not None})
    for dataset, weight in zip(datasets, listed(data.get("probabilities")), strict=False):
        dataset["weight"] = weight
    mask = data.get("loss_mask") or {}
    if mask and all(mask.get(role) for role in ("system", "user")):
        for dataset in datasets:
            dataset["train_on"] = "all"
    elif (
        any(mask.get(role) for role in ("system", "user", "tool")) or mask.get("assistant") is False
    ):
        conversion.missed.append(("data.loss_mask", mask, 'train_on is "assistant" or "all"'))
    conversion.set("data.datasets", datasets or None)


def _set_vision(conversion: Conversion) -> None:
    """Train the tower for images, unless it is frozen, as by default and beside an adapter."""
    trainer = _section(_section(conversion.source, "trainer"), "model")
    for model in (_section(conversion.source, "model"), trainer):
        if vlm := _section(model, "vlm"):
            conversion.images = "model.vlm"
            if vlm.get("freeze_vision_encoder") is False and not conversion.get("adapter.kind"):
                conversion.set("model.vision.train", "all")


def _asked_server(conversion: Conversion, value: Any) -> None:
    """List the server that an evaluation asks, which has no counterpart; drop its other options."""
    if not isinstance(value, Mapping):
        conversion.miss("a table is expected there")
        return
    for key, option in value.items():
        if key == "base_url" and option:
            reason = "answers come from the weights in model.path, not from a server"
            conversion.missed.append(("client.base_url", option, reason))
        else:
            conversion.drop("settings of their own servers", f"client.{key}")


def _client(conversion: Conversion, value: Any) -> None:
    if isinstance(value, Mapping) and (urls := list(listed(value.get("base_url")))):
        conversion.set("rollout.engine", "vllm")
        conversion.set("rollout.vllm.servers", [url.removesuffix("/v1") for url in urls])


RULES = load_rules("prime_rl", {**vars(shared), **globals()})
"""Every key that is known."""
