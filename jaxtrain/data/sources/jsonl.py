"""Rows of JSON lines and text files by an index of byte offsets, and of JSON arrays in memory."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.safe_io import InvalidValue, UnreadableRow, parse_json, read_bytes
from jaxtrain.text_safety import show

BLOCK = 1 << 24
"""Bytes read at once in the search for line ends."""
MAX_ROW = 1 << 25
"""Bytes of one row; a larger one is never read into memory."""
MAX_FILE = 1 << 28
"""Bytes of a file that is read as a whole."""
TOO_LARGE = f"a row of more than {MAX_ROW >> 20} MiB"


class JsonlRows:
    """Rows of a JSON-lines file, read on access; 20 bytes of memory per row."""

    holds = "JSON lines"

    def __init__(self, path: str) -> None:
        self.path = str(path)
        self.starts, self.lengths, self.lines = _index(self.path)
        self._file: BinaryIO | None = None
        if not len(self.starts):
            raise UserError(f"{self.path} is empty: it holds no {self.holds}")

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.lengths[index] > MAX_ROW:
            return UnreadableRow(TOO_LARGE)
        # Each process opens its own file object, because workers must not share a position.
        if self._file is None:
            self._file = open(self.path, "rb")
        self._file.seek(int(self.starts[index]))
        line = self._file.read(int(self.lengths[index]))
        return self.parse(line, self.path, int(self.lines[index]))

    @staticmethod
    def parse(line: bytes, path: str, number: int) -> dict[str, Any]:
        """Parse a row of the file."""
        return parse_line(line, path, number)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None}

    def origin(self, index: int) -> str:
        """Return the name of a row in messages: file and line number."""
        return f"{Path(self.path).name} line {int(self.lines[index])}"


class TextRows(JsonlRows):
    """Rows {"text": line} of a text file without blank lines, read on access."""

    holds = "text"

    @staticmethod
    def parse(line: bytes, path: str, number: int) -> dict[str, Any]:
        """Decode a line without its line end; UserError if it is not UTF-8."""
        try:
            return {"text": line.decode().rstrip("\r\n").removeprefix("\ufeff")}
        except UnicodeDecodeError as error:
            raise UserError(
                f"{path} line {number} is not UTF-8 text (byte {error.start + 1}); save it as UTF-8"
            ) from None


class JsonRows:
    """Rows of a file that is one JSON array of objects, or an object with one such array."""

    def __init__(self, path: str) -> None:
        self.path = str(path)
        check_size(self.path, "as JSON lines, one object a line, it is read row by row")
        try:
            content = parse_json(read_bytes(path, MAX_FILE), unique=True)
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
        """Return the name of a row in messages: file and number, from 1."""
        return f"{Path(self.path).name} row {index + 1}"


def open_json(path: str) -> JsonlRows | JsonRows:
    """Open a .json file, which may contain JSON lines."""
    with open(path, "rb") as file:
        lines = filter(bytes.strip, iter(lambda: file.readline(MAX_ROW), b""))
        line, second_line = next(lines, b""), next(lines, b"")
    if not line:
        raise UserError(f"{path} is empty")
    if line.lstrip().startswith(b"["):
        return JsonRows(path)
    # One object per line is JSON lines; a file with a single line may be either.
    try:
        first = parse_json(line)
    except ValueError:
        return JsonRows(path)
    if isinstance(first, dict) and (
        second_line or not any(isinstance(v, list) for v in first.values())
    ):
        return JsonlRows(path)
    return JsonRows(path)


def read_lines(
    path: str, parse: Callable[[bytes, str, int], dict[str, Any]] | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file of lines in order; JSON lines, unless `parse` is set."""
    parse = parse or parse_line
    with open(path, "rb") as file:
        number = 0
        while line := file.readline(MAX_ROW + 1):
            number += 1
            complete = len(line) <= MAX_ROW or line.endswith(b"\n")
            while not complete and (rest := file.readline(BLOCK)):
                complete = rest.endswith(b"\n")
                line = b""
            if line.strip() or not line:
                yield parse(line, path, number) if line else UnreadableRow(TOO_LARGE)


def parse_line(line: bytes, path: str, number: int) -> dict[str, Any]:
    """Parse a line to a row: UnreadableRow if its JSON is valid but unusable.

    Raises UserError with file and line for anything but a JSON object.
    """
    try:
        row = parse_json(line, unique=True)
    except InvalidValue as error:
        return UnreadableRow(str(error))
    except ValueError as error:
        raise UserError(f"{path} line {number} is not valid JSON: {error}") from error
    if not isinstance(row, dict):
        raise UserError(f"{path} line {number}: expected an object, found {_kind(row)}")
    return row


def check_size(path: str, advice: str) -> None:
    """Raise UserError for a file too large for memory: too many bytes, or too many values, each of
    which takes many times its bytes."""
    size, commas, opened = 0, 0, 0
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            size += len(block)
            commas += block.count(b",") + block.count(b"\n")
            opened += block.count(b"[") + block.count(b"{")
            if size > MAX_FILE or commas > MAX_FILE // 8 or opened > MAX_FILE // 64:
                raise UserError(
                    f"{path} is too large to be held in memory (at most {MAX_FILE:,} bytes, and"
                    f" {MAX_FILE // 8:,} values); {advice}"
                )


def _kind(value: Any) -> str:
    return {list: "a list", str: "a string", type(None): "null"}.get(type(value), show(value))


def _index(path: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return byte offset (int64), length and number from 1 (int32) of each line that is not blank.

    Memory is bounded by a block, however long a line is.
    """
    starts, firsts, position, fresh = [], [], 0, True
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            if position == 0 and block.startswith((b"\xff\xfe", b"\xfe\xff")):
                raise UserError(f"{path} is UTF-16 text; save it as UTF-8")
            content = np.frombuffer(block, np.uint8)
            start = np.flatnonzero(content == 10) + 1
            start = np.concatenate([[0], start]) if fresh else start
            fresh = block.endswith(b"\n")
            start = start[start < len(content)]
            starts.append(start + position)
            firsts.append(content[start])
            position += len(block)
        if not starts:
            return np.zeros(0, np.int64), np.zeros(0, np.int32), np.zeros(0, np.int32)
        start, first = np.concatenate(starts), np.concatenate(firsts)
        end = np.append(start[1:] - 1, position - 1 if fresh else position)
        length = end - start
        keep = length > 0
        # Only lines that begin with white space can be blank.
        for index in np.flatnonzero(keep & np.isin(first, list(b" \t\r\v\f"))):
            file.seek(int(start[index]))
            keep[index] = bool(file.read(min(int(length[index]), BLOCK)).strip())
    numbers = np.flatnonzero(keep).astype(np.int32) + 1
    return start[keep], np.minimum(length[keep], 2**31 - 1).astype(np.int32), numbers
