"""Bounded reading of untrusted files: UTF-8 text, and JSON without unlimited nesting.

Problems raise a ValueError of one line without the file's name: the caller can name the place, and
decides whether to skip a row or to stop the run.
"""

import json
import os
import re
import stat
from pathlib import Path
from typing import Any

from jaxtrain.text_safety import show

DEPTH = 100
"""Nesting limit of tables and lists; deeper ones overflow the stack of recursive code."""

POINTER = b"version https://git-lfs.github.com/spec/"
"""How a file of Git LFS begins whose content was not fetched."""
POINTED = "is a pointer of Git LFS: run git lfs pull in its folder"

CONTAINERS = (dict, list, tuple)
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_BOMS = {b"\xff\xfe\x00\x00": "UTF-32", b"\x00\x00\xfe\xff": "UTF-32"} | {
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}


class InvalidValue(ValueError):
    """Well-formed JSON with an unusable value."""


class UnreadableRow(dict):
    """Placeholder for a row that cannot be used; it has no columns and stores the reason."""

    def __init__(self, reason: str, origin: str = ""):
        super().__init__()
        self.reason = reason
        """Short and countable."""
        self.origin = origin
        """File and row, if the source does not say it itself: "train.jsonl line 17, message 2"."""


def read_text(path: str | Path, most: int) -> str:
    """Return the text of a regular file of at most `most` bytes in UTF-8, with or without a BOM.

    Raises ValueError with the reason ("is a folder", "is not UTF-8 text: ..."), or OSError.
    """
    return decode(read_bytes(path, most))


def is_pointer(path: Path) -> bool:
    """Return True for a pointer of Git LFS in a file's place."""
    with path.open("rb") as file:
        return file.read(len(POINTER)) == POINTER


def read_bytes(path: str | Path, most: int) -> bytes:
    """Return the content of a regular file of at most `most` bytes. ValueError, OSError: see
    read_text."""
    # O_NONBLOCK: opening a pipe must not wait for its writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise ValueError("is a folder, not a file")
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("is no regular file but a pipe or a device")
        if status.st_size > most:
            raise ValueError(f"has {status.st_size:,} bytes; at most {most:,} are read")
        with open(descriptor, "rb", closefd=False) as file:
            content = file.read(most)
    finally:
        os.close(descriptor)
    if content.startswith(POINTER):
        raise ValueError(POINTED)
    return content


def decode(raw: bytes) -> str:
    """Bytes as text; ValueError where they are not UTF-8, or hold a NUL, as no text does."""
    for mark, name in _BOMS.items():
        if raw.startswith(mark):
            raise ValueError(f"is {name} text; save it as UTF-8")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"is not UTF-8 text: byte 0x{raw[error.start]:02x} in line {line}; save it as UTF-8"
        ) from None
    if "\0" in text:
        raise ValueError(
            f"holds a NUL byte in line {text.count(chr(10), 0, text.index(chr(0))) + 1}"
        )
    return text


def parse_json(
    text: str | bytes, *, strict: bool = False, unique: bool = False, surrogates: bool = False
) -> Any:
    """Return the value of a JSON text; ValueError with a reason of one line.

    It is InvalidValue where a value is nested deeper than DEPTH, a text has half a surrogate pair,
    which nothing can encode, or a whole number has more than 4,300 digits. unique refuses keys that
    stand twice in one table, and strict NaN and Infinity as well. surrogates takes half pairs.
    """
    if isinstance(text, bytes):
        try:
            text = text.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(f"not UTF-8 text: byte 0x{error.object[error.start]:02x}") from None
    try:
        if strict:
            value = json.loads(text, object_pairs_hook=_Once(text), parse_constant=_no_constant)
        else:
            value = json.loads(text, object_pairs_hook=_Once(text) if unique else None)
    except RecursionError:
        raise InvalidValue(f"nested deeper than {DEPTH} levels") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} (line {error.lineno}, column {error.colno})") from None
    except InvalidValue:
        raise
    except ValueError as error:
        kind = InvalidValue if "digits" in str(error) else ValueError
        raise kind(str(error).partition(";")[0][:200]) from None
    # Nearly all rows end here: a few brackets, no escaped surrogates.
    if text.count("{") + text.count("[") > DEPTH and too_deep(value):
        raise InvalidValue(f"nested deeper than {DEPTH} levels")
    spelled = _ESCAPED_SURROGATE.search(text) or _SURROGATE.search(text)
    if spelled and not surrogates and has_surrogates(value):
        raise InvalidValue("a text with half a surrogate pair")
    return value


def too_deep(value: Any, depth: int = DEPTH) -> bool:
    """Return whether tables and lists are nested deeper than `depth`, without recursion."""
    level = [value] if isinstance(value, CONTAINERS) else []
    for _ in range(depth):
        if not level:
            return False
        # A vocabulary has 100,000 texts and pairs of texts: no calls for each.
        level = [
            child
            for container in level
            for child in (container.values() if isinstance(container, dict) else container)
            if type(child) is not str and isinstance(child, CONTAINERS)
        ]
    return bool(level)


def has_surrogates(value: Any) -> bool:
    """Return whether any text in a value, keys included, has half a surrogate pair."""
    pending = [value]
    while pending:
        element = pending.pop()
        if isinstance(element, str):
            if _SURROGATE.search(element):
                return True
        elif isinstance(element, dict):
            pending += [*element, *element.values()]
        elif isinstance(element, list | tuple):
            pending += element
    return False


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number that JSON has")


class _Once:
    """An object_pairs_hook for json that refuses a duplicate key and names its lines."""

    def __init__(self, text: str):
        self.text = text

    def __call__(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) == len(pairs):
            return table
        seen: set[str] = set()
        key = next(key for key, _ in pairs if key in seen or seen.add(key))
        occurrences = re.finditer(re.escape(json.dumps(key)) + r"\s*:", self.text)
        lines = [
            str(self.text.count("\n", 0, occurrence.start()) + 1)
            for occurrence, _ in zip(occurrences, range(5), strict=False)
        ]
        where = f" (lines {', '.join(lines)})" if "\n" in self.text.strip() else ""
        raise InvalidValue(f"the key {show(key)} stands twice in one table{where}")
