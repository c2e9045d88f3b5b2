"""JSON files as rows: JSON lines by an index of byte offsets, JSON arrays in memory."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from jaxtrain.errors import UserError

BLOCK = 1 << 24
"""Bytes read at once while line ends are looked for."""


class JsonlRows:
    """Rows of a JSON-lines file, read when asked for; 16 bytes of memory a row."""

    def __init__(self, path: str) -> None:
        self.path = str(path)
        self.starts, self.lines = _index(self.path)
        self._file: BinaryIO | None = None
        if not len(self.starts):
            raise UserError(f"{self.path} is empty: it holds no JSON lines")

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        # A file object of its own for each process: workers must not share a position.
        if self._file is None:
            self._file = open(self.path, "rb")
        self._file.seek(int(self.starts[index]))
        return parse_line(self._file.readline(), self.path, int(self.lines[index]))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None}

    def origin(self, index: int) -> str:
        """File and line number."""
        return f"{Path(self.path).name} line {int(self.lines[index])}"


class JsonRows:
    """Rows of a file that is one JSON array of objects, or an object with one such array."""

    def __init__(self, path: str) -> None:
        self.path = str(path)
        try:
            content = json.loads(Path(path).read_bytes())
        except ValueError as error:
            raise UserError(f"{self.path} is not valid JSON: {error}") from error
        if isinstance(content, dict):
            lists = [value for value in content.values() if isinstance(value, list)]
            content = lists[0] if len(lists) == 1 else None
        if not isinstance(content, list):
            raise UserError(
                f"{self.path} holds no list of rows: expected a JSON array of objects, an object "
                "with one such array, or JSON lines"
            )
        if not content:
            raise UserError(f"{self.path} is empty: its list has no rows")
        self.rows = content

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.rows[index]
        if not isinstance(row, dict):
            raise UserError(f"{self.origin(index)}: expected an object, found {_kind(row)}")
        return row

    def origin(self, index: int) -> str:
        """File and number of the row, from 1."""
        return f"{Path(self.path).name} row {index + 1}"


def open_json(path: str) -> JsonlRows | JsonRows:
    """A .json file, which may hold JSON lines all the same."""
    with open(path, "rb") as file:
        line = next((line for line in file if line.strip()), b"")
        more = next((line for line in file if line.strip()), b"")
    if not line:
        raise UserError(f"{path} is empty")
    # One object a line is JSON lines; a file of one line that is an object may be either.
    try:
        first = json.loads(line)
    except ValueError:
        return JsonRows(path)
    if isinstance(first, dict) and (more or not any(isinstance(v, list) for v in first.values())):
        return JsonlRows(path)
    return JsonRows(path)


def read_lines(path: str) -> Iterator[dict[str, Any]]:
    """Rows of a JSON-lines file from first to last."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield parse_line(line, path, number)


def parse_line(line: bytes, path: str, number: int) -> dict[str, Any]:
    """One row; raises UserError with file and line."""
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UserError(f"{path} line {number} is not valid JSON: {error}") from error
    if not isinstance(row, dict):
        raise UserError(f"{path} line {number}: expected an object, found {_kind(row)}")
    return row


def _kind(value: Any) -> str:
    return {list: "a list", str: "a string", type(None): "null"}.get(type(value), repr(value))


def _index(path: str) -> tuple[np.ndarray, np.ndarray]:
    """Byte offset and number (from 1) of each line that is not blank, int64."""
    ends, position = [], 0
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            ends.append(np.flatnonzero(np.frombuffer(block, np.uint8) == 10) + position)
            position += len(block)
        end = np.concatenate(ends) if ends else np.zeros(0, np.int64)
        if position and (not len(end) or end[-1] != position - 1):
            end = np.append(end, position)
        start = np.concatenate([np.zeros(1, np.int64), end[:-1] + 1]) if len(end) else end
        keep = end > start
        # Only short lines can be blank in practice; those are looked at.
        for short in np.flatnonzero(keep & (end - start < 64)):
            file.seek(int(start[short]))
            keep[short] = bool(file.read(int(end[short] - start[short])).strip())
    return start[keep], np.flatnonzero(keep) + 1
