"""The verb: look, judge, print"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxtrain.arguments import Parser
from jaxtrain.runs.doctor import accelerators, surroundings
from jaxtrain.runs.doctor.collect import collect
from jaxtrain.runs.doctor.config_needs import read_needs
from jaxtrain.runs.doctor.needs import Facts, Finding
from jaxtrain.text_safety import escape_control_chars, shorten

JUDGES: dict[str, tuple[Callable[[Facts], Any], ...]] = {
    "python": (accelerators.judge_python,),
    "jax": (accelerators.judge_jax, accelerators.judge_devices),
    "packages": (
        accelerators.judge_plugins,
        surroundings.judge_packages,
        surroundings.judge_optional,
    ),
    "nvidia": (accelerators.judge_driver, surroundings.judge_libraries),
    "tpu": (accelerators.judge_libtpu,),
    "memory": (surroundings.judge_memory,),
    "disks": (surroundings.judge_disks,),
    "hub": (surroundings.judge_hub,),
    "ports": (surroundings.judge_ports,),
    "vllm": (surroundings.judge_vllm,),
    "config": (surroundings.judge_config,),
}
"""Who judges, under the facts that they are mostly about."""
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
    findings: list[Finding] = []
    for name, judges in JUDGES.items():
        if name in failed and name != "jax":
            findings.append(Finding(name, "note", f"could not be looked at: {failed[name]}"))
            continue
        for judge_part in judges:
            answer = judge_part(complete)
            findings += [answer] if isinstance(answer, Finding) else answer
    return findings


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
