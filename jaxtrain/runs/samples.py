"""samples.jsonl: sampled answers of the model, for people and for the tools that display runs.

Every line has `step`, `reward`, `rewards`, `prompt`, `completion`, `finish_reason` and `tokens`;
answers to a set of problems also `set`, those of a training round `prompt_number` and
`policy_version`, those to images `thumbnails`, data URLs by the hashes of the images.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

SAMPLES = "samples.jsonl"
TABLE_COLUMNS = ("step", "reward", "rewards", "prompt", "completion", "finish_reason", "tokens")
MAX_ROWS = 64
"""Answers of a table; samples.jsonl has all that are recorded."""
MAX_CELL = 4000
"""Characters of a table cell; the middle of a longer text is left out."""


MAX_MESSAGE = 200_000
"""Characters of a message that are read for showing it."""

Sample = Mapping[str, Any]
"""Line of samples.jsonl, which anybody may have written."""


def append_samples(
    folder: Path, step: int, samples: Iterable[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Append answers drawn at `step` to the samples of a run's folder; return the lines."""
    lines = [{"step": step, **sample} for sample in samples]
    if lines:
        with (folder / SAMPLES).open("a", encoding="utf-8") as file:
            for line in lines:
                file.write(write_line(line) + "\n")
    return lines


def write_line(line: Mapping[str, Any]) -> str:
    """Return a line of JSON that every reader accepts: null for non-finite numbers, escapes for the
    lone surrogates that a model may write."""
    try:
        text = json.dumps(line, ensure_ascii=False, default=str, allow_nan=False)
        text.encode()
        return text
    except UnicodeEncodeError:
        return json.dumps(finite(line), default=str)
    except ValueError:
        return write_line(finite(line))


def finite(value: Any) -> Any:
    """Return a nested value with non-finite floats replaced by None."""
    if isinstance(value, Mapping):
        return {str(key): finite(element) for key, element in value.items()}
    if isinstance(value, list | tuple):
        return [finite(element) for element in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_messages(value: Any) -> list[dict[str, Any]]:
    """Return a prompt or an answer as a list of messages."""
    if isinstance(value, list):
        return [m if isinstance(m, dict) else {"role": "", "content": str(m)} for m in value]
    return [] if value is None else [{"role": "", "content": str(value)}]


def message_text(message: Sample) -> str:
    """Return a message's text, its parts joined, with size and path of an image in its place."""
    value = message.get("content")
    if isinstance(value, list):
        value = "\n".join(map(_part_text, value))
    return "" if value is None else str(value)[:MAX_MESSAGE]


def _part_text(part: Any) -> str:
    if not isinstance(part, dict):
        return str(part)
    if part.get("type") == "image" and "width" in part and "height" in part:
        path = f" {part['path']}" if part.get("path") else ""
        return f"[image {part['width']}x{part['height']}{path}]"
    return str(part.get("text", part))


def table_rows(lines: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """Return at most MAX_ROWS lines of samples.jsonl as rows of TABLE_COLUMNS."""
    return [[_cell(line.get(name)) for name in TABLE_COLUMNS] for line in lines[:MAX_ROWS]]


def _cell(value: Any) -> Any:
    if value is None or isinstance(value, int | float):
        return value
    if isinstance(value, list) and all(isinstance(turn, Mapping) for turn in value):
        value = "\n".join(f"{turn.get('role')}: {turn.get('content')}" for turn in value)
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    half = MAX_CELL // 2
    return text if len(text) <= MAX_CELL else f"{text[:half]} ... {text[-half:]}"
