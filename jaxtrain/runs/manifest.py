"""Integrity record of a folder: every file with its size and sha256, written last.

A folder is finished if its manifest.json exists, and good if the manifest agrees with the files.
The record has a checksum of its own, so that damage to it is detected as well.
"""

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jaxtrain.safe_io import parse_json, read_bytes

NAME = "manifest.json"
MAX_BYTES = 2**28
"""Largest size of a manifest; one of a hundred thousand files has about ten million bytes."""


def write_manifest(folder: Path, record: dict[str, Any]) -> None:
    """Seal `folder`: `record` plus {"files": {path: [bytes, sha256]}}, atomically."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p != folder / NAME)
    with ThreadPoolExecutor(4) as pool:
        digests = list(pool.map(hash_file, files))
    sizes = [path.stat().st_size for path in files]
    names = [path.relative_to(folder).as_posix() for path in files]
    body = {**record, "files": {n: list(f) for n, *f in zip(names, sizes, digests, strict=True)}}
    text = json.dumps({**body, "sha256": _digest(body)}, indent=1)
    write_atomically(folder / NAME, text)


def is_sealed(folder: Path) -> bool:
    """Return True if the folder was finished; its files are not checked."""
    return (folder / NAME).is_file()


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the sealed record; raise FileNotFoundError or ValueError if it is missing or
    damaged."""
    body = parse_json(read_bytes(folder / NAME, MAX_BYTES))
    if not isinstance(body, dict) or body.pop("sha256", None) != _digest(body):
        raise ValueError(f"{NAME} does not match its own checksum")
    files, metrics = body.get("files"), body.get("metrics", {})
    if not isinstance(files, dict) or not isinstance(metrics, dict):
        raise ValueError(f"{NAME} does not list its files")
    if not all(isinstance(entry, list) and len(entry) == 2 for entry in files.values()):
        raise ValueError(f"{NAME} does not list its files with size and checksum")
    return body


def find_damage(folder: Path) -> str | None:
    """Describe how the first damaged file differs from the manifest; None if all files are
    intact."""
    try:
        body = read_manifest(folder)
    except FileNotFoundError:
        return f"{NAME} is missing"
    except (OSError, ValueError):
        return f"{NAME} is not readable"
    for name, (size, _) in body["files"].items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size:,} bytes instead of {size:,}"
    with ThreadPoolExecutor(4) as pool:
        digests = pool.map(lambda name: hash_file(folder / name), body["files"])
        try:
            for (name, (_, expected)), digest in zip(body["files"].items(), digests, strict=True):
                if digest != expected:
                    return f"the content of {name} has changed"
        except OSError as error:  # a bad disk, or the training run is deleting it
            return f"{error.filename or NAME} cannot be read ({error.strerror})"
    return None


def hash_file(path: Path) -> str:
    """Return the sha256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_atomically(path: Path, text: str, durable: bool = True) -> None:
    """Write a small file so that a kill leaves either the old or the new content; with `durable`, a
    power failure does too."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        if durable:
            os.fsync(file.fileno())
    temporary.replace(path)


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
