"""The jsonl files of a run as they are found: lines that a kill cut off, that a disk damaged, that
somebody edited. No jax here."""

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jaxtrain.safe_io import parse_json

MOST_LINE = 2**26
"""Bytes of a line; what follows is another one, and damaged."""


class MetricsRecord(NamedTuple):
    """One line."""

    number: int
    """From 1."""
    raw: bytes
    """As it stands there, without its end."""
    value: dict[str, Any] | None
    """The object that it holds; None where it is damaged."""
    whole: bool
    """Whether it has an end: the last line of a killed run may not."""

    @property
    def step(self) -> int | None:
        """The step that the line is about; None where it names none."""
        step = (self.value or {}).get("step")
        return step if isinstance(step, int) and not isinstance(step, bool) else None


def read_records(path: Path) -> Iterator[MetricsRecord]:
    """The lines of a file that are not blank, one after the other; raises OSError."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MOST_LINE):
            number += 1
            raw = line.strip()
            if raw:
                yield MetricsRecord(number, raw, read_object(raw), line.endswith(b"\n"))


def read_object(raw: bytes) -> dict[str, Any] | None:
    """The object that a line holds; None where it holds none."""
    try:
        value = parse_json(raw)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def ends_whole(path: Path) -> bool:
    """Whether a file can be continued on a new line: it is not there, empty, or ends with one."""
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
