"""Axolotl's form of a sweep: `key: [values]` are crossed, the settings in the list `_` are taken as
they are, and nothing else is said."""

from collections.abc import Mapping
from typing import Any

from jaxtrain.convert import SYSTEMS, Conversion, read_numbers
from jaxtrain.errors import UserError
from jaxtrain.runs.sweep.space import flatten
from jaxtrain.text_safety import show

PAIRED = "_"


def is_axolotl(table: Mapping[str, Any]) -> bool:
    """Return whether a file is an Axolotl sweep: lists of values and no section."""
    return (
        bool(table)
        and all(isinstance(value, list) for value in table.values())
        and ("together" not in table)
    )


def convert_sweep(table: Mapping[str, Any]) -> dict[str, Any]:
    """{"grid": ..., "together": ...} in our keys; UserError for one that has no counterpart."""
    grid: dict[str, list[Any]] = {}
    together: list[dict[str, list[Any]]] = []
    for key, values in read_numbers(dict(table)).items():
        rows = values if key == PAIRED else [{key: value} for value in values]
        if not all(isinstance(row, dict) for row in rows):
            raise UserError(f"{key}: must be a list of settings, found {show(values)}")
        converted = [convert_row(row) for row in rows]
        keys = list(dict.fromkeys(name for row in converted for name in row))
        columns = {name: [row.get(name) for row in converted] for name in keys}
        if any(name not in row for row in converted for name in keys):
            raise UserError(
                f"{key}: some of its settings are {', '.join(keys)} here, and others only a part"
                " of that; write the sweep in our keys"
            )
        if len(columns) > 1:
            together.append(columns)
        else:
            grid |= columns
    return {"grid": grid, "together": together}


def convert_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """{our key: value} of one setting of theirs."""
    conversion = Conversion(row)
    conversion.run(SYSTEMS["axolotl"].RULES, row)
    overrides = flatten(conversion.table)
    if conversion.missed or not overrides:
        key, value, why = (
            conversion.missed[0] if conversion.missed else (*next(iter(row.items())), "no key")
        )
        raise UserError(f"{key} = {show(value)} has no counterpart here: {why}")
    return overrides
