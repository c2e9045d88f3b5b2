"""Table of log-probs of answers on disk, keyed by their tokens.

The log-probs of a fixed reference model are computed once. A branch that is missing in the table
raises an error, so that no values of other data are used for it. A folder is sealed with checksums
and describes the model and data of its values; any other is refused, never used or replaced.
"""

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxtrain.batch import Batch
from jaxtrain.data.comparisons.pairs import SCORE
from jaxtrain.data.packing.branches import TreeBranch, list_branches
from jaxtrain.data.sources.cache import DONE
from jaxtrain.errors import UserError
from jaxtrain.runs.manifest import find_damage, is_sealed, write_manifest

TABLE, ABOUT = "table.npz", "about.json"
KEY_BYTES = 16


class UnknownAnswer(Exception):
    """An answer is not in the table."""


class Arrays(NamedTuple):
    """Contents of a table, for the disk and other processes."""

    keys: np.ndarray
    """uint8 [n, KEY_BYTES]"""
    counts: np.ndarray
    """int64 [n] number of tokens of each answer."""
    values: np.ndarray
    """[their sum] log-probs, in the order of the keys."""


class LogpTable:
    """Mapping from the tokens of a branch to the log-probs of its answer."""

    def __init__(self, arrays: Arrays | None = None):
        self._spans: dict[bytes, slice] = {}
        self._parts: list[np.ndarray] = []
        self._values = np.zeros(0, np.float32)
        if arrays is not None:
            stops = np.cumsum(arrays.counts).tolist()
            for key, start, stop in zip(arrays.keys, [0, *stops], stops, strict=False):
                self._spans[key.tobytes()] = slice(start, stop)
            self._values = arrays.values

    def __len__(self) -> int:
        return len(self._spans)

    def add(self, batch: Batch, logp: np.ndarray) -> None:
        """Add the log-probs [A, B, T] of all answers of a batch of data/comparisons/pairs.py."""
        for branch, start in list_answers(batch, logp):
            key, logps = key_of(branch, start), branch.streams["value"][start:]
            if key not in self._spans:
                start_of_new = self._spans[next(reversed(self._spans))].stop if self._spans else 0
                self._spans[key] = slice(start_of_new, start_of_new + len(logps))
                self._parts.append(logps)

    def arrays(self) -> Arrays:
        """Return the contents of the table."""
        if self._parts:
            self._values = np.concatenate([*([self._values] if len(self._values) else []),
                                           *self._parts])  # fmt: skip
            self._parts = []
        keys = np.frombuffer(b"".join(self._spans), np.uint8).reshape(-1, KEY_BYTES)
        counts = np.array([span.stop - span.start for span in self._spans.values()], np.int64)
        return Arrays(keys, counts, self._values)

    def fill(self, batch: Batch) -> np.ndarray:
        """Return the log-probs [A, B, T] of a batch's answers, 0 elsewhere; raises
        UnknownAnswer."""
        if self._parts:
            self.arrays()
        shape = batch.tokens.shape
        filled = np.zeros(shape, self._values.dtype)
        index = np.broadcast_to(np.arange(shape[-1], dtype=np.int32), shape)
        for branch, start in list_answers(batch, index):
            span = self._spans.get(key_of(branch, start))
            places = branch.streams["value"][start:]
            if span is None or span.stop - span.start != len(places):
                raise UnknownAnswer
            filled[branch.row][places] = self._values[span]
        return filled


def list_answers(batch: Batch, values: np.ndarray) -> Iterator[tuple[TreeBranch, int]]:
    """Yield (branch with stream "value", index of its first trained token) of trained branches."""
    weights = {SCORE: batch.weights[SCORE]}
    for branch in list_branches(batch._replace(weights=weights, streams={"value": values})):
        trained = branch.weights[SCORE] != 0
        if trained.any():
            yield branch, int(np.argmax(trained))


def key_of(branch: TreeBranch, start: int) -> bytes:
    """Digest the tokens of a branch and the beginning of its answer."""
    digest = hashlib.blake2b(str(start).encode(), digest_size=KEY_BYTES)
    digest.update(np.ascontiguousarray(branch.tokens, np.int32).tobytes())
    return digest.digest()


def write_table(table: LogpTable, folder: Path, about: Mapping[str, Any]) -> None:
    """Write a table to a folder atomically. about: description of what the values depend on."""
    name = f"{folder.name}.{os.getpid()}-{secrets.token_hex(4)}.unfinished"
    unfinished = folder.with_name(name)
    unfinished.mkdir(parents=True)
    try:
        np.savez(unfinished / TABLE, **table.arrays()._asdict())
        (unfinished / ABOUT).write_text(json.dumps(dict(about), indent=1))
        write_manifest(unfinished, {})
        (unfinished / DONE).write_text(json.dumps({"answers": len(table)}))
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def read_table(folder: Path, about: Mapping[str, Any]) -> Arrays | None:
    """Read a table; None if there is none or its writing was interrupted.

    about: what its values must depend on. Raises UserError for a damaged table and for one of other
    values.
    """
    if not (folder / DONE).is_file():
        return None
    os.utime(folder / DONE)
    stored = read_about(folder)
    differing = [name for name, value in about.items() if stored.get(name) != value]
    problem = find_damage(folder) if is_sealed(folder) else None  # early versions did not seal
    if problem is None and differing:
        problem = f"they are of other {', '.join(differing)}"
    if problem is None:
        try:
            with np.load(folder / TABLE, allow_pickle=False) as file:
                arrays = Arrays(*(file[name] for name in Arrays._fields))
            problem = find_fault(arrays)
        except Exception as error:  # zip and numpy each have their own ways to be damaged
            problem = f"{TABLE} is not readable ({type(error).__name__})"
    if problem is None:
        return arrays
    raise UserError(
        f"the reference log-probs in {folder} cannot be used (task.reference precomputed):"
        f" {problem}. Delete that folder, and a new run computes them again"
    )


def find_fault(arrays: Arrays) -> str | None:
    """Describe why arrays are no table; None if they are one."""
    keys, counts, values = arrays
    shapes = keys.ndim == 2 and keys.shape[1] == KEY_BYTES and counts.shape == keys.shape[:1]
    kinds = keys.dtype == np.uint8 and counts.dtype == np.int64 and values.dtype.kind == "f"
    if not shapes or not kinds or (counts < 1).any() or values.shape != (counts.sum(),):
        return "its arrays do not belong together"
    if bad := int(np.count_nonzero(~np.isfinite(values))):
        return f"{bad:,} of {values.size:,} log-probs are NaN or infinite"
    return None


def read_about(folder: Path) -> dict[str, Any]:
    """Read the description of a table; {} if there is none."""
    try:
        about = json.loads((folder / ABOUT).read_text())
    except (OSError, ValueError):
        return {}
    return about if isinstance(about, dict) else {}


def list_tables(folder: Path) -> Iterator[dict[str, Any]]:
    """Read the descriptions of all tables in `folder`, newest first."""
    entries = sorted(folder.glob(f"*/{DONE}"), key=lambda path: -path.stat().st_mtime)
    return (read_about(entry.parent) for entry in entries)
