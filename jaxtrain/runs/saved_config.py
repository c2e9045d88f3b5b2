"""Saved configs side by side. No jax here."""

from typing import Any


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested tables and lists of tables as {"data.datasets.0.path": value}."""
    if isinstance(value, dict) and value:
        pairs = value.items()
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        pairs = enumerate(value)
    else:
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, item in pairs:
        flat |= flatten(item, f"{prefix}.{key}" if prefix else str(key))
    return flat


UNTOLD = ("run.output_dir", "log.", "run.resume", "run.overwrite")
"""Keys whose difference between runs says nothing about what they learned."""


def differing_keys(configs: list[dict[str, Any]]) -> list[str]:
    """Keys of flat configs whose values are not the same in all of them: first those that all
    have, then those that are newer than one of the runs, or of another method."""
    keys = dict.fromkeys(key for config in configs for key in config)
    found = [
        key
        for key in keys
        if not key.startswith(UNTOLD)
        and any(config.get(key) != configs[0].get(key) for config in configs[1:])
    ]
    return sorted(found, key=lambda key: not all(key in config for config in configs))
