"""Read untrusted folders: their JSON files, and the files that these name.

Every JSON file of a model or adapter folder is read with `read_object`; every file that one of its
files names is opened through `find_inside`.
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
"""Limit of a JSON file; parsed it takes some twenty times that. The index of 90,000 tensors has 9
MB."""
HUB_BLOB = re.compile(r".*/(models|datasets)--[^/]+/blobs/[0-9a-f]{40,64}")


def read_object(file: Path, max_bytes: int = MAX_BYTES, *, strict: bool = False) -> dict[str, Any]:
    """Return the object of a JSON file. Raises UserError with the file and the problem.

    strict: refuse duplicate keys in an object.
    """
    return parse_object(_read(file, max_bytes), str(file), strict=strict)


def read_text(file: Path, max_bytes: int = MAX_BYTES) -> str:
    """Return the text of a file. Raises UserError with the file and the problem."""
    try:
        return foreign.decode(_read(file, max_bytes))
    except ValueError as error:
        raise UserError(f"{file} {error}") from None


def parse_object(raw: bytes, name: str, *, strict: bool = False) -> dict[str, Any]:
    """Parse bytes as `read_object` does; name: a description of them for the message."""
    try:
        parsed = foreign.parse_json(raw, strict=strict)
    except ValueError as error:
        raise UserError(f"{name} cannot be read as JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise UserError(f"{name} holds {describe(parsed)}, not a JSON object")
    return parsed


def find_inside(folder: Path, name: Any, referrer: Path) -> Path:
    """Return the file of that name in the folder, as named by its file `referrer`.

    Raises UserError for a name that leaves the folder, itself or through a link (except links of
    the Hugging Face cache to its blobs), and for one that is not a file.
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
    """Raise UserError for a link that leaves the folder, except links of the Hub's cache."""
    target = os.path.realpath(path)
    if os.path.commonpath([target, os.path.realpath(folder)]) == os.path.realpath(folder):
        return
    if not HUB_BLOB.fullmatch(target):
        raise UserError(
            f"{path} is a link out of its folder, to {shorten(target, 200)}; copy the file, or name"
            " the folder that holds it"
        )


def describe(value: Any) -> str:
    """Describe a JSON value for a message: its type and its beginning."""
    if value is None or isinstance(value, bool):
        return shorten(value)
    return f"{name_type(value)}, {shorten(value)}"


def spell(key: str, limit: int = 100) -> str:
    """Return a key for a message, shortened and without control characters."""
    return shorten(key, limit)[1:-1]


def shorten(value: Any, limit: int = 60) -> str:
    """Return a value as JSON, shortened and without control characters."""
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
