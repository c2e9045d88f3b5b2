"""Rows taken from the training data as held-out ones: by what is asked in them, not by chance.

Rows that ask the same stand on the same side, so that no prompt is trained on and evaluated. Which
prompts are held out follows from their text alone: the same in every process, after a resume, with
any seed, and nearly the same when rows are added.
"""

import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxtrain.config.data import DatasetConfig
from jaxtrain.errors import UserError

ANSWERERS = {"assistant", "gpt", "model", "bot", "chatgpt"}
WHICH = {"path", "name", "split", "max_rows", "fields", "roles", "options", "held_out"}


@dataclass(frozen=True)
class SelectedIndices:
    """Some of other rows, in their order."""

    rows: Any
    indices: np.ndarray
    """int64."""

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[int(self.indices[index])]

    def origin(self, index: int) -> str:
        """As the whole names it."""
        return self.rows.origin(int(self.indices[index]))


def take_side(rows: Any, dataset: DatasetConfig) -> SelectedIndices:
    """The training or the held-out rows, as `dataset.part` says; UserError where one would be
    empty."""
    if not hasattr(rows, "__len__"):
        raise UserError(
            f"{dataset.path}: a stream has no length that data.validation_split divides"
        )
    held = _find_held(rows, dataset)
    return SelectedIndices(rows, np.flatnonzero(held if dataset.part == "held_out" else ~held))


def question_of(row: Mapping[str, Any], dataset: DatasetConfig) -> Any:
    """What a row asks: its prompt, or its messages before the first answer; else the whole row."""

    def column(name: str) -> Any:
        return row.get(dataset.fields.get(name, name))

    if column("prompt"):
        return column("prompt")
    if column("instruction"):
        return [column(name) for name in ("instruction", "input", "system")]
    for name in ("messages", "conversations", "chosen"):
        if isinstance(messages := column(name), list):
            return _before_answer(messages, dataset) or row
    return row


def _before_answer(messages: list[Any], dataset: DatasetConfig) -> list[Any]:
    keys = {dataset.fields.get("messages.role", "role"), "from"}
    asked = []
    for message in messages:
        found = [message.get(key) for key in keys] if isinstance(message, Mapping) else []
        roles = {dataset.roles.get(str(role), str(role)) for role in found if role is not None}
        if roles & ANSWERERS:
            break
        asked.append(message)
    return asked


def _find_held(rows: Any, dataset: DatasetConfig) -> np.ndarray:
    """bool [rows]: whether each is held out."""
    key = dataset.model_dump_json(include=WHICH)
    known = _known(key, len(rows))
    if not known:
        known.append(divide(rows, dataset))
    return known[0]


@functools.lru_cache(maxsize=64)
def _known(key: str, count: int) -> list[np.ndarray]:
    """What was found of such data already: every evaluation opens them again."""
    return []


def divide(rows: Any, dataset: DatasetConfig) -> np.ndarray:
    """bool [rows]: prompts in the order of their hashes until as many rows as `dataset.held_out`
    says are held out."""
    number, share = len(rows), dataset.held_out
    wanted = round(share * number) if share < 1 else int(share)
    digests = [
        hashlib.blake2b(
            json.dumps(question_of(rows[index], dataset), sort_keys=True, default=repr).encode(
                "utf-8", "surrogatepass"
            ),
            digest_size=8,
        ).digest()
        for index in range(number)
    ]
    _, group, sizes = np.unique(
        np.frombuffer(b"".join(digests), ">u8"), return_inverse=True, return_counts=True
    )
    before = np.cumsum(sizes) - sizes
    held = (before < wanted)[group]
    if not 0 < held.sum() < number:
        side = "no row is left to train on" if held.any() else "none would be held out"
        raise UserError(
            f"{dataset.path}: held_out (or data.validation_split) {share:g} of {number} rows with"
            f" {len(sizes)} prompts: {side}; change it, or name data.eval_datasets"
        )
    return held
