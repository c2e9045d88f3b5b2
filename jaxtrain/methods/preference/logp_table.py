"""Log-probs of known answers, found again by the tokens that they are of, and kept on disk.

A reference that never changes says the same of the same tokens every time: it is asked once. A
branch that is not in the table is told as such, so that no number of other data is taken for it.
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

TABLE, ABOUT = "table.npz", "about.json"
KEY_BYTES = 16


class UnknownAnswer(Exception):
    """An answer that is not in the table."""


class Arrays(NamedTuple):
    """A table for the disk and for other processes."""

    keys: np.ndarray
    """uint8 [n, KEY_BYTES]"""
    counts: np.ndarray
    """int64 [n] tokens of each answer."""
    values: np.ndarray
    """[their sum] log-probs, in the order of the keys."""


class LogpTable:
    """{tokens of a branch: log-probs of its answer}."""

    def __init__(self, arrays: Arrays | None = None):
        self._place: dict[bytes, slice] = {}
        self._parts: list[np.ndarray] = []
        self._values = np.zeros(0, np.float32)
        if arrays is not None:
            stops = np.cumsum(arrays.counts).tolist()
            for key, start, stop in zip(arrays.keys, [0, *stops], stops, strict=False):
                self._place[key.tobytes()] = slice(start, stop)
            self._values = arrays.values

    def __len__(self) -> int:
        return len(self._place)

    def add(self, batch: Batch, logp: np.ndarray) -> None:
        """Keep the log-probs [A, B, T] of all answers of a batch of data/comparisons/pairs.py."""
        for branch, start in list_answers(batch, logp):
            key, logps = key_of(branch, start), branch.streams["value"][start:]
            if key not in self._place:
                start_of_new = self._place[next(reversed(self._place))].stop if self._place else 0
                self._place[key] = slice(start_of_new, start_of_new + len(logps))
                self._parts.append(logps)

    def arrays(self) -> Arrays:
        """All of it."""
        if self._parts:
            self._values = np.concatenate([*([self._values] if len(self._values) else []),
                                           *self._parts])  # fmt: skip
            self._parts = []
        keys = np.frombuffer(b"".join(self._place), np.uint8).reshape(-1, KEY_BYTES)
        counts = np.array([span.stop - span.start for span in self._place.values()], np.int64)
        return Arrays(keys, counts, self._values)

    def fill(self, batch: Batch) -> np.ndarray:
        """The log-probs [A, B, T] of a batch's answers, 0 elsewhere; raises Unknown."""
        if self._parts:
            self.arrays()
        shape = batch.tokens.shape
        filled = np.zeros(shape, self._values.dtype)
        index = np.broadcast_to(np.arange(shape[-1], dtype=np.int32), shape)
        for branch, start in list_answers(batch, index):
            span = self._place.get(key_of(branch, start))
            if span is None:
                raise UnknownAnswer
            filled[branch.row][branch.streams["value"][start:]] = self._values[span]
        return filled


def list_answers(batch: Batch, values: np.ndarray) -> Iterator[tuple[TreeBranch, int]]:
    """(branch with stream "value", index of its first trained token), of each branch with one."""
    weights = {SCORE: batch.weights[SCORE]}
    for branch in list_branches(batch._replace(weights=weights, streams={"value": values})):
        trained = branch.weights[SCORE] != 0
        if trained.any():
            yield branch, int(np.argmax(trained))


def key_of(branch: TreeBranch, start: int) -> bytes:
    """Digest of a branch's tokens and of where its answer begins."""
    digest = hashlib.blake2b(str(start).encode(), digest_size=KEY_BYTES)
    digest.update(np.ascontiguousarray(branch.tokens, np.int32).tobytes())
    return digest.digest()


def write_table(table: LogpTable, folder: Path, about: Mapping[str, Any]) -> None:
    """Into a folder, whole or not at all; about: what the numbers depend on, for people."""
    name = f"{folder.name}.{os.getpid()}-{secrets.token_hex(4)}.unfinished"
    unfinished = folder.with_name(name)
    unfinished.mkdir(parents=True)
    try:
        np.savez(unfinished / TABLE, **table.arrays()._asdict())
        (unfinished / ABOUT).write_text(json.dumps(dict(about), indent=1))
        (unfinished / DONE).write_text(json.dumps({"answers": len(table)}))
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def read_table(folder: Path) -> Arrays | None:
    """What write_table wrote; None where nothing whole is there."""
    if not (folder / DONE).is_file():
        return None
    os.utime(folder / DONE)
    try:
        with np.load(folder / TABLE, allow_pickle=False) as file:
            return Arrays(*(file[name] for name in Arrays._fields))
    except (OSError, ValueError, KeyError):
        return None


def read_about(folder: Path) -> dict[str, Any]:
    """What write_table was told that a table depends on; empty where nothing is there."""
    try:
        about = json.loads((folder / ABOUT).read_text())
    except (OSError, ValueError):
        return {}
    return about if isinstance(about, dict) else {}


def list_tables(folder: Path) -> Iterator[dict[str, Any]]:
    """The same of all tables in `folder`, the newest first."""
    entries = sorted(folder.glob(f"*/{DONE}"), key=lambda path: -path.stat().st_mtime)
    return (read_about(entry.parent) for entry in entries)
