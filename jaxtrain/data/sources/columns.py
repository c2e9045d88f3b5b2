"""Which columns make which format."""

from collections.abc import Iterable, Mapping

COLUMNS: dict[str, tuple[tuple[str, ...], ...]] = {
    "chat": (("messages",), ("conversations",)),
    "input_output": (("segments",),),
    "prompt_completion": (("prompt", "completion"),),
    "alpaca": (("instruction", "output"),),
    "completion": (("text",),),
}
"""The columns that each format needs, in order of preference when several fit."""

OPTIONAL = {"tools", "system", "input"}
"""Columns that a format reads when they are there."""


def detect_format(columns: Iterable[str], fields: Mapping[str, str] | None = None) -> str | None:
    """Name of the first format whose columns are all there, or None.

    fields: wanted = found, as in data.datasets[].fields.
    """
    names = set(columns)
    names |= {wanted for wanted, found in (fields or {}).items() if found in names}
    for name, alternatives in COLUMNS.items():
        if any(names >= set(needed) for needed in alternatives):
            return name
    return None


def accepted_columns() -> str:
    """The formats with the columns that they need, a line each."""
    lines = []
    for name, alternatives in COLUMNS.items():
        lines.append(f"  {name}: " + " or ".join(" + ".join(needed) for needed in alternatives))
    return "\n".join(lines)
