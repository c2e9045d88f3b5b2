"""Reader of a run's jsonl files, which may hold lines that a kill truncated, a disk damaged or a
person edited. No jax here."""

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jaxtrain.safe_io import parse_json

MAX_LINE_BYTES = 2**26
"""Longest line; the rest of a longer one is read as another, damaged line."""


class MetricsRecord(NamedTuple):
    """Line of a jsonl file."""

    number: int
    """Line number, from 1."""
    raw: bytes
    """Bytes of the line, without the newline."""
    value: dict[str, Any] | None
    """JSON object of the line; None if it is damaged."""
    terminated: bool
    """True if the line ends with a newline; the last line of a killed run may not."""

    @property
    def step(self) -> int | None:
        """Return the step of the line; None if it has none."""
        step = (self.value or {}).get("step")
        return step if isinstance(step, int) and not isinstance(step, bool) else None


def read_records(path: Path) -> Iterator[MetricsRecord]:
    """Yield the non-blank lines of a file; raise OSError if it cannot be read."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES):
            number += 1
            raw = line.strip()
            if raw:
                yield MetricsRecord(number, raw, read_object(raw), line.endswith(b"\n"))


def read_object(raw: bytes) -> dict[str, Any] | None:
    """Return the JSON object of a line; None if it is not one."""
    try:
        value = parse_json(raw)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def ends_with_newline(path: Path) -> bool:
    """Return True if appending to the file begins a new line: it is missing, empty, or ends with
    one."""
    if not path.exists() or path.stat().st_size == 0:
        return True
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) == b"\n"


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten nested tables and lists of tables to {"data.datasets.0.path": value}."""
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


IRRELEVANT_KEYS = ("run.output_dir", "log.", "run.resume", "run.overwrite")
"""Keys whose difference between runs does not change what they learn."""


def differing_keys(configs: list[dict[str, Any]]) -> list[str]:
    """Return the keys of flat configs whose values differ: first those that all of them have, then
    those that are newer than one of the runs, or of another method."""
    keys = dict.fromkeys(key for config in configs for key in config)
    differing = [
        key
        for key in keys
        if not key.startswith(IRRELEVANT_KEYS)
        and any(config.get(key) != configs[0].get(key) for config in configs[1:])
    ]
    return sorted(differing, key=lambda key: not all(key in config for config in configs))
