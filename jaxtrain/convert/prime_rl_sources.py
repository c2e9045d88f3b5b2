"""Environments of prime-rl: sources of rounds, and sets of evaluations."""

from collections.abc import Mapping
from typing import Any

from jaxtrain.convert.conversion import Conversion
from jaxtrain.convert.shared import listed

KEYS_OF_SOURCE = (
    *("id", "args", "name", "env", "taskset", "harness", "runtime", "ratio", "num_tasks", "limit"),
    *("num_examples", "group_size", "rollouts_per_example", "interval", "sampling"),
)
KEYS_OF_EVALUATION = ("source", "select", "skip_first_step", "max_retries", *KEYS_OF_SOURCE)
TASKS_OF_A_SET = 32
"""Tasks of an evaluation of all tasks, whose number only the taskset knows."""


def environment(conversion: Conversion, entry: Mapping[str, Any]) -> dict[str, Any]:
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
        extra = {key: value for key, value in agent.items() if key not in ("harness", "runtime")}
        harness = dict(agent.get("harness") or {})
        runtime = {**(harness.pop("runtime", None) or {}), **(agent.get("runtime") or {})}
        for key, kind, options in (("harness", "id", harness), ("runtime", "type", runtime)):
            verifiers[key] = options.get(kind)
            if set(options) - {kind} or (options and len(agents) > 1):
                extra[key] = options
        if extra:
            verifiers.setdefault("agents", {})[name] = extra
    for key, value in world.items():
        if key not in (*KEYS_OF_SOURCE, "algo") and key not in agents and value:
            reason = "here it is that of all environments, or of section env"
            conversion.missed.append((f"env.{key}", value, reason))
    verifiers = {key: value for key, value in verifiers.items() if value is not None}
    return {"kind": "verifiers", "verifiers": verifiers}


def set_evaluation(conversion: Conversion) -> None:
    """Turn the environments of an evaluation into sets."""
    source = conversion.source
    outer = source.get("eval")
    evaluation = (source.get("orchestrator") or {}).get("eval") or outer
    if outer and evaluation is not outer:
        conversion.missed.append(("eval", outer, "the sets are those of orchestrator.eval"))
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
            merged = {**evaluation, **(evaluation.get("select") or {}), **entry}
            rows = next(
                (merged[k] for k in ("num_tasks", "num_examples", "limit") if merged.get(k)), -1
            )
            if rows < 1:
                rows = TASKS_OF_A_SET
                text = "all tasks there; set options.num_rows to how many the taskset has"
                conversion.log(text, "eval.sets")
            env = environment(conversion, entry)
            drawn = {**sampling, **(entry.get("sampling") or {})}
            values = {
                "name": entry.get("name") or env["verifiers"]["taskset"],
                "path": "builtin:tasks",
                "split": "train",
                "options": {"num_rows": rows},
                "k": merged.get("group_size") or merged.get("rollouts_per_example"),
                "temperature": drawn.get("temperature"),
                "max_new_tokens": drawn.get("max_completion_tokens") or drawn.get("max_tokens"),
                "env": env,
            }
            sets.append({key: value for key, value in values.items() if value is not None})
    if sets:
        conversion.set("eval.sets", sets)
        conversion.set("eval.every", evaluation.get("interval") or 100)
        conversion.set("eval.at_start", not evaluation.get("skip_first_step"))


def refills(entry: Mapping[str, Any]) -> bool:
    """Return whether a source leaves out groups without advantages, and nothing else."""
    curriculum = entry.get("curriculum") or {}
    gates = list((curriculum.get("gates") or {}).values())
    names = [str(gate.get("type") or gate.get("import_path")).rpartition(".")[2] for gate in gates]
    plain = all(set(gate) <= {"type", "import_path"} for gate in gates) and len(curriculum) == 1
    return bool(names) and plain and set(names) <= {"advantage_range", "AdvantageRangeGate"}
