"""The verb plugins: names that configs may use, built in and installed, and what clashes"""

import json
from typing import Any

from jaxtrain.arguments import Parser

BUILTIN = {
    "tasks": "jaxtrain.config.root:TASKS",
    "formats": "jaxtrain.config.data:FORMATS",
    "models": "jaxtrain.models:ARCHITECTURES",
    "rewards": "jaxtrain.environments.rewards.load:BUILTIN",
    "envs": "jaxtrain.config.env:BUILTIN",
    "engines": "jaxtrain.generation.engines:ENGINES",
    "curators": "jaxtrain.generation.curators:CURATORS",
    "observers": "jaxtrain.config.observers:OBSERVERS",
    "optimizers": "jaxtrain.config.model:OPTIMIZERS",
    "schedules": "jaxtrain.config.model:SCHEDULES",
    "verbs": "jaxtrain.cli:VERBS",
}
"""Variables that hold a group's built-in names."""


def run_plugins(argv: list[str]) -> int:
    """List every group of names with what is built in and what installed packages bring; exit code
    2 where names clash or, with --load, something cannot be imported."""
    parser = Parser("jaxtrain plugins", description=run_plugins.__doc__)
    parser.add_argument("--load", action="store_true", help="import what is installed as well")
    parser.add_argument("--json", action="store_true", help="one object instead of text")
    args = parser.parse_args(argv)
    listing = list_plugins(load=args.load)
    print(json.dumps(listing, indent=1) if args.json else render(listing))
    return 2 if listing["problems"] else 0


def list_plugins(*, load: bool) -> dict[str, Any]:
    """{"groups": {group: {"key", "builtin", "installed"}}, "problems": [...]}"""
    from jaxtrain import plugins
    from jaxtrain.errors import UserError

    groups: dict[str, Any] = {}
    problems: list[str] = []
    for group, entries in plugins.list_groups().items():
        builtin = read_builtin(group)
        if group not in plugins.GROUPS:
            names = ", ".join(sorted({plugins.find_owner(entry) for entry in entries}))
            near = plugins.suggest(group, plugins.GROUPS)
            problems.append(f"{names}: nobody reads entry points of jaxtrain.{group}{near}")
        for name in dict.fromkeys(entry.name for entry in entries):
            try:
                if group in plugins.GROUPS:
                    plugins.check(group, name, builtin, key=f"jaxtrain.{group}")
                    if load:
                        modules = group in ("tasks", "models")
                        plugins.find(group, name, {}, key=f"jaxtrain.{group}", modules=modules)
            except UserError as error:
                problems.append(str(error))
        groups[group] = {
            "key": plugins.GROUPS.get(group, ""),
            "builtin": builtin,
            "installed": [
                {
                    "name": entry.name,
                    "object": entry.value,
                    "distribution": entry.dist.name if entry.dist else "",
                    "version": entry.dist.version if entry.dist else "",
                }
                for entry in entries
            ],
        }
    return {"groups": groups, "problems": problems}


def read_builtin(group: str) -> list[str]:
    """Return a group's built-in names."""
    from importlib.metadata import EntryPoint

    path = BUILTIN.get(group)
    return [] if path is None else list(EntryPoint(group, path, "builtin").load())


def render(listing: dict[str, Any]) -> str:
    """Render the list for people."""
    from jaxtrain.text_safety import escape_control_chars

    lines = []
    for group, facts in listing["groups"].items():
        lines.append(f"{group:<12}{facts['key']}")
        if facts["builtin"]:
            lines += wrap(", ".join(facts["builtin"]))
        for plugin in facts["installed"]:
            owner = f"{plugin['distribution']} {plugin['version']}".strip() or "an unnamed package"
            lines.append(f"  + {plugin['name']}   {owner}   {plugin['object']}")
    lines += ["", *(f"problem: {line}" for line in listing["problems"])]
    if not listing["problems"]:
        lines.append('no problems; "module:name" and "file.py:name" will do for any name')
    return escape_control_chars("\n".join(lines))


def wrap(text: str) -> list[str]:
    """Wrap a list of names into lines."""
    import textwrap

    return textwrap.wrap(text, 96, initial_indent="    ", subsequent_indent="    ")
