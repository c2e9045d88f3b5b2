"""prime-rl's TOML, `rl.toml` and `sft.toml`, with the names of several versions."""

from collections.abc import Mapping
from typing import Any

from jaxtrain.convert import shared
from jaxtrain.convert.conversion import Conversion, load_rules
from jaxtrain.convert.shared import (
    finish,
    finish_sampling,
    listed,
)

SECTIONS = ("orchestrator", "trainer", "inference", "deployment")
KEYS_OF_SOURCE = (
    *("id", "args", "name", "env", "taskset", "harness", "runtime", "ratio", "num_tasks", "limit"),
    *("num_examples", "group_size", "rollouts_per_example", "interval", "sampling"),
)
KEYS_OF_EVALUATION = ("source", "select", "skip_first_step", "max_retries", *KEYS_OF_SOURCE)
TASKS_OF_A_SET = 32
"""Tasks of an evaluation that there is of all tasks, whose number only the taskset knows."""

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
    if "orchestrator" not in table and "train" in table:  # an orchestrator's own file
        known = RULES["orchestrator"].inner or {}
        table = {**table, "orchestrator": {k: table[k] for k in table if k in known}}
        table = {k: v for k, v in table.items() if k not in table["orchestrator"]}
    conversion = Conversion(table)
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
        conversion.missed.append(("optim.lr", 0.0, "optim.learning_rate is above 0"))
        conversion.remove("optim.learning_rate")
    conversion.attempt(_finish_rounds if drawn else _set_data, _set_evaluation, finish)
    return conversion


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
    trainer = (conversion.source.get("trainer") or {}).get("model") or {}
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
    _set_algorithm(conversion, orchestrator.get("algo") or {})
    keys = ("source", "env", "environment")
    entries = [e for place in (train, orchestrator) for key in keys for e in listed(place.get(key))]
    datasets = []
    for entry in entries:
        rows = entry.get("num_tasks") or entry.get("num_examples")
        dataset = {"path": "builtin:tasks", "options": {"num_rows": rows or prompts}}
        if entry.get("ratio"):
            dataset["weight"] = entry["ratio"]
        datasets.append(dataset | {"env": _environment(conversion, entry)})
    if len(datasets) == 1:
        conversion.set("env", datasets[0].pop("env"))
    conversion.set("data.datasets", datasets or None)
    if datasets:
        text = "rows are numbers of tasks; set options.num_rows to how many the taskset has"
        conversion.log(text, "data.datasets")


def _environment(conversion: Conversion, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return section env of an environment with its taskset, harness and runtime."""
    world = {**entry, **(entry.get("env") or {})}
    taskset = dict(world.get("taskset") or {"id": world.get("id"), **(world.get("args") or {})})
    verifiers: dict[str, Any] = {"taskset": str(taskset.pop("id", None)).partition("@")[0]}
    if taskset:
        verifiers["args"] = taskset
    agents = {
        name: value
        for name, value in world.items()
        if isinstance(value, Mapping) and name != "env" and {"harness", "runtime"} & set(value)
    }
    if "harness" in world:
        agents["agent"] = {key: world[key] for key in ("harness", "runtime") if key in world}
    for name, agent in agents.items():
        more = {key: value for key, value in agent.items() if key not in ("harness", "runtime")}
        harness = dict(agent.get("harness") or {})
        runtime = {**(harness.pop("runtime", None) or {}), **(agent.get("runtime") or {})}
        for key, kind, options in (("harness", "id", harness), ("runtime", "type", runtime)):
            verifiers[key] = options.get(kind)
            if set(options) - {kind} or (options and len(agents) > 1):
                more[key] = options
        if more:
            verifiers.setdefault("agents", {})[name] = more
    for key, value in world.items():
        if key not in KEYS_OF_SOURCE and key not in agents and value:
            reason = "here it is that of all environments, or of section env"
            conversion.missed.append((f"env.{key}", value, reason))
    verifiers = {key: value for key, value in verifiers.items() if value is not None}
    return {"kind": "verifiers", "verifiers": verifiers}


def _set_evaluation(conversion: Conversion) -> None:
    """Turn the environments of an evaluation into sets."""
    source = conversion.source
    evaluation = (source.get("orchestrator") or source).get("eval")
    if not isinstance(evaluation, Mapping):
        return
    sampling = evaluation.get("sampling") or {}
    sets = []
    read = ("temperature", "max_tokens", "max_completion_tokens")
    unread = {f"eval.sampling.{k}": v for k, v in sampling.items() if k not in read}
    unread |= {f"eval.{k}": v for k, v in evaluation.items() if k not in KEYS_OF_EVALUATION}
    for key, value in unread.items():
        conversion.missed.append((key, value, "[[eval.sets]] has no such key"))
    for key in ("source", "env"):
        for entry in listed(evaluation.get(key)):
            of = {**evaluation, **(evaluation.get("select") or {}), **entry}
            rows = next((of[k] for k in ("num_tasks", "num_examples", "limit") if of.get(k)), -1)
            if rows < 1:
                rows = TASKS_OF_A_SET
                text = "all tasks there; set options.num_rows to how many the taskset has"
                conversion.log(text, "eval.sets")
            env = _environment(conversion, entry)
            drawn = {**sampling, **(entry.get("sampling") or {})}
            values = {
                "name": entry.get("name") or env["verifiers"]["taskset"],
                "path": "builtin:tasks",
                "split": "train",
                "options": {"num_rows": rows},
                "k": of.get("group_size") or of.get("rollouts_per_example"),
                "temperature": drawn.get("temperature"),
                "max_new_tokens": drawn.get("max_completion_tokens") or drawn.get("max_tokens"),
                "env": env,
            }
            sets.append({key: value for key, value in values.items() if value is not None})
    if sets:
        conversion.set("eval.sets", sets)
        conversion.set("eval.every", evaluation.get("interval") or 100)
        conversion.set("eval.at_start", not evaluation.get("skip_first_step"))


def _set_algorithm(conversion: Conversion, algorithm: Mapping[str, Any]) -> None:
    """Set section task: rewards less their group's mean, over all tokens; or a teacher."""
    name = algorithm.get("type") or algorithm.get("id") or "grpo"
    if name in ("opd", "on_policy_distillation"):
        teacher = algorithm.get("teacher") or {}
        url = next(listed(teacher.get("base_url")), None)
        conversion.table["task"] = {"kind": "distillation", "on_policy_share": 1.0, "beta": 1.0}
        conversion.set("task.teacher.path", teacher.get("name"))
        if url:
            conversion.set("task.teacher.kind", "server")
            conversion.set("task.teacher.url", url.removesuffix("/v1"))
            conversion.set("task.top_k", 20)
        return
    loss = ((conversion.source.get("trainer") or {}).get("loss") or {}).get("type")
    if name not in ("grpo", "default") or loss == "sft":
        reason = "see docs/reference/config.md for the tasks"
        if "sft" in (name, loss):
            name = "sft"
            reason = "write a teacher's answers with jaxtrain generate --input, and train on them"
        conversion.table["task"] = {"kind": name}
        conversion.missed.append(("orchestrator.algo.type", name, reason))
        return
    if conversion.get("task.importance_max") or conversion.get("task.importance_min"):
        conversion.set("task.importance_correction", "token_mask")
    for key, value in (("objective", "grpo"), ("average", "token"), ("scale_rewards", "none")):
        conversion.set(f"task.{key}", value)


def _loss_type(conversion: Conversion, value: Any) -> None:
    if value not in ("default", "grpo"):
        conversion.set("task.ratio", "sequence" if value == "gspo" else None)
        if value != "gspo":
            conversion.miss('task.objective is "grpo" here')


def _recompute(conversion: Conversion, value: Any) -> None:
    if value is not False and value is not None:
        conversion.set("model.remat", "full")


def _set_data(conversion: Conversion) -> None:
    """Turn the data of supervised fine-tuning into datasets."""
    data = conversion.source.get("data")
    if not isinstance(data, Mapping):
        return
    datasets: list[dict[str, Any]] = []
    for source in [{"dataset": data.get("name")}, *listed(data.get("source"))]:
        path = source.get("dataset") if isinstance(source, Mapping) else None
        if path:
            kept = {"path": path, "name": source.get("subset"), "split": source.get("split")}
            datasets.append({key: value for key, value in kept.items() if value is not None})
        elif source != {"dataset": None}:
            conversion.missed.append(
                ("data.source", source, "a dataset is a file, folder or Hub id")
            )
    for key, name in (("subsets", "name"), ("splits", "split")):
        for dataset, value in zip(
            datasets * len(data.get(key) or []), data.get(key) or [], strict=False
        ):
            dataset[name] = value
    mask = data.get("loss_mask") or {}
    if mask and all(mask.get(role) for role in ("system", "user")):
        for dataset in datasets:
            dataset["train_on"] = "all"
    elif (
        any(mask.get(role) for role in ("system", "user", "tool")) or mask.get("assistant") is False
    ):
        conversion.missed.append(("data.loss_mask", mask, 'train_on is "assistant" or "all"'))
    conversion.set("data.datasets", datasets or None)


def _client(conversion: Conversion, value: Any) -> None:
    if isinstance(value, Mapping) and (urls := list(listed(value.get("base_url")))):
        conversion.set("rollout.engine", "vllm")
        conversion.set("rollout.vllm.servers", [url.removesuffix("/v1") for url in urls])


RULES = load_rules("prime_rl", {**vars(shared), **globals()})
"""Every key that is known."""
