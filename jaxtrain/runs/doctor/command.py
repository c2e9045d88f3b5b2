"""The verb: look, judge, print"""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from jaxtrain.arguments import Parser
from jaxtrain.errors import UserError
from jaxtrain.runs.doctor.collect import collect
from jaxtrain.runs.doctor.judges import JUDGES
from jaxtrain.runs.doctor.needs import Facts, Finding
from jaxtrain.text_safety import escape_control_chars, shorten

EMPTY: Facts = {
    "python": {"version": "", "executable": "", "install": "pip install -U"},
    "packages": {"versions": {}, "requires": []},
    "nvidia": {"state": "missing", "driver": None, "message": "", "gpus": [], "files": []},
    "tpu": {"chips": 0, "kind": None},
    "hub": {"cache": "", "offline": False, "token": False, "models": []},
}
"""What the other judges take where something could not be looked at."""


def doctor_command(argv: list[str]) -> int:
    """Report what is installed here, what does not fit together and how to fix it. The exit code is
    1 if there is an error."""
    parser = Parser("jaxtrain doctor", description=doctor_command.__doc__)
    parser.add_argument(
        "--config", type=os.path.expanduser, help="also what this config needs; file or name"
    )
    parser.add_argument("--json", action="store_true", help="findings and facts as one object")
    parser.add_argument(
        "--seconds", type=float, default=90.0, help="how long jax may take to start (default 90)"
    )
    parser.add_argument("overrides", nargs="*", help="of the config: section.key=value")
    args = parser.parse_intermixed_args(argv)
    if args.overrides and args.config is None:
        parser.error("section.key=value goes with --config FILE")
    config = read_needs(args.config, args.overrides) if args.config else None
    facts = collect(args.seconds, Path((config or {}).get("output") or "runs"), config)
    findings = judge(facts)
    healthy = not any(finding.level == "error" for finding in findings)
    if args.json:
        listed = [finding._asdict() for finding in findings]
        print(json.dumps({"ok": healthy, "findings": listed, "facts": facts}, indent=1))
    else:
        print(render(findings))
    return 0 if healthy else 1


def judge(facts: Facts) -> list[Finding]:
    """Every finding, in the order in which people fix them."""
    failed = {
        name: value["failed"]
        for name, value in facts.items()
        if isinstance(value, dict) and "failed" in value
    }
    complete = facts | {name: EMPTY[name] for name in failed if name in EMPTY}
    findings: dict[Finding, None] = {}
    for name, check in JUDGES:
        if name in failed and name != "jax":
            findings[Finding(name, "note", f"could not be looked at: {failed[name]}")] = None
        else:
            findings |= dict.fromkeys(check(complete))
    return list(findings)


def render(findings: list[Finding]) -> str:
    """A line for each, what to do under it, and a last line that counts."""
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        text = " ".join(shorten(escape_control_chars(finding.text), 700).split())
        lines.append(f"{finding.level:<5}  {finding.name:<{width}}  {text}")
        if finding.do:
            lines.append(f"{'':<5}  {'':<{width}}  -> {escape_control_chars(finding.do)}")
    count = {level: sum(f.level == level for f in findings) for level in ("error", "note")}
    if count["error"]:
        lines.append(f"{count['error']} to mend (error), {count['note']} to know (note)")
    else:
        lines.append(f"all well; {count['note']} to know (note)" if count["note"] else "all well")
    return "\n".join(lines)


def read_needs(path: str, overrides: Sequence[str] = ()) -> Facts:
    """Packages by the keys that ask for them, model, folder; "problem": why it cannot be read."""
    try:
        from jaxtrain.config import load_config

        config = load_config(path, overrides)
    except UserError as error:
        return {"path": path, "problem": str(error)}
    except ImportError as error:  # of what jaxtrain requires; named under packages
        return {"path": path, "problem": f"configs cannot be read: {error}"}
    rollout, vllm = config.rollout, config.rollout.vllm
    rewards = {reward.function for reward in config.rewards}
    optional = [
        ("rollout.service ray", "ray", rollout.service.startswith("ray")),
        ("rollout.vllm.launch ray", "ray", vllm.launch == "ray"),
        ("rollout.vllm.discover", "vllm-router", vllm.discover.startswith("router+")),
        ("env.kind verifiers", "verifiers", config.env.kind == "verifiers"),
        ("reward math", "math-verify", "math" in rewards),
        ("reward json_schema", "jsonschema", "json_schema" in rewards),
        ("log.wandb_project", "wandb", config.log.wandb_project is not None),
        ("log.tensorboard", "tensorboardX", config.log.tensorboard),
    ]
    starts = rollout.engine == "vllm" and vllm.launch == "local"
    model = config.model.path
    return {
        "path": path,
        "problem": None,
        "output": config.run.output_dir,
        "packages": [(key, package) for key, package, needed in optional if needed],
        "model": model,
        "model_here": bool(model) and Path(os.path.expanduser(model or "")).is_dir(),
        "compute_dtype": config.model.compute_dtype,
        "vllm": starts,
        "vllm_python": vllm.python if starts else None,
    }
