"""The border to a folder that somebody else wrote: its JSON files, and what its names point to.

Everything of a model folder or an adapter folder that is read as JSON goes through `read_object`,
every file that one of its files names through `find_inside`.
"""

import json
import os
import re
import stat
from pathlib import Path
from typing import Any

from jaxtrain import safe_io as foreign
from jaxtrain.errors import UserError
from jaxtrain.text_safety import name_type

MAX_BYTES = 32 * 2**20
"""Of a JSON file; parsed it takes some twenty times that. The index of 90,000 tensors has 9 MB."""
HUB_BLOB = re.compile(r".*/(models|datasets)--[^/]+/blobs/[0-9a-f]{40,64}")


def read_object(file: Path, max_bytes: int = MAX_BYTES, *, strict: bool = False) -> dict[str, Any]:
    """The object that a JSON file holds; UserError names the file and what is wrong with it.

    strict: a key may not stand in an object twice.
    """
    return parse_object(_read(file, max_bytes), str(file), strict=strict)


def read_text(file: Path, max_bytes: int = MAX_BYTES) -> str:
    """The text of a file; UserError names the file and what is wrong with it."""
    try:
        return foreign.decode(_read(file, max_bytes))
    except ValueError as error:
        raise UserError(f"{file} {error}") from None


def parse_object(raw: bytes, name: str, *, strict: bool = False) -> dict[str, Any]:
    """As `read_object`, of bytes in hand; name: what they are, for the message."""
    try:
        parsed = foreign.parse_json(raw, strict=strict)
    except ValueError as error:
        raise UserError(f"{name} cannot be read as JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise UserError(f"{name} holds {describe(parsed)}, not a JSON object")
    return parsed


def find_inside(folder: Path, name: Any, referrer: Path) -> Path:
    """The file of that name in the folder, which `referrer`, a file of it, speaks of.

    UserError for a name that leads out of the folder, by itself or through a link, but for the
    links of the Hugging Face cache to its blobs; and for one that is no file.
    """
    parts = Path(name).parts if isinstance(name, str) else ()
    if not parts or "\0" in name or ".." in parts or Path(name).is_absolute():
        raise UserError(
            f"{referrer} names the file {shorten(name)}, which is not a name inside this folder;"
            " nothing outside of it is read"
        )
    path, shown = folder / name, f"{folder}/{spell(name, 200)}"
    try:
        status = path.stat()
    except OSError:
        raise UserError(f"{shown} is missing, but {referrer.name} names it") from None
    if not stat.S_ISREG(status.st_mode):
        raise UserError(f"{shown} is not a regular file, but {referrer.name} names it")
    check_inside(folder, path)
    return path


def check_inside(folder: Path, path: Path) -> None:
    """UserError for a link that leads out of the folder; those of the Hub's cache are its own."""
    target = os.path.realpath(path)
    if os.path.commonpath([target, os.path.realpath(folder)]) == os.path.realpath(folder):
        return
    if not HUB_BLOB.fullmatch(target):
        raise UserError(
            f"{path} is a link out of its folder, to {shorten(target, 200)}; copy the file, or name"
            " the folder that holds it"
        )


def describe(value: Any) -> str:
    """A JSON value for a message: what it is, and its beginning."""
    if value is None or isinstance(value, bool):
        return shorten(value)
    return f"{name_type(value)}, {shorten(value)}"


def spell(key: str, limit: int = 100) -> str:
    """A key for a message: as it is, cut, and without control characters."""
    return shorten(key, limit)[1:-1]


def shorten(value: Any, limit: int = 60) -> str:
    """A value as it is written in JSON, cut, and without control characters."""
    if isinstance(value, str):
        value = value[: 2 * limit]
    try:
        text = json.dumps(value, default=repr)
    except (ValueError, RecursionError):
        text = f"a {type(value).__name__}"
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _read(file: Path, max_bytes: int) -> bytes:
    try:
        return foreign.read_bytes(file, max_bytes)
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise UserError(f"{file} {error}") from None
