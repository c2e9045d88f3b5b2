"""Held-out rows split off the training data by their prompts.

Rows with equal prompts are on the same side, so that no prompt is both trained on and evaluated.
The choice depends only on the text of the prompts: it is the same in every process, after a resume
and with any seed, and nearly the same when rows are added.
"""

import functools
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxtrain.config.data import DatasetConfig
from jaxtrain.data.chat.messages import ROLES, MalformedRow
from jaxtrain.data.chat.rows import MESSAGES, parse_messages
from jaxtrain.data.sources.row_views import SelectedRows
from jaxtrain.errors import UserError

WHICH = {"path", "name", "split", "max_rows", "fields", "roles", "options", "held_out"}


def take_side(rows: Any, dataset: DatasetConfig) -> SelectedRows:
    """Return the training or the held-out rows, as `dataset.part` says; UserError if one of the two
    would be empty."""
    if not hasattr(rows, "__len__"):
        raise UserError(
            f"{dataset.path}: a stream has no length that data.validation_split divides"
        )
    held = _find_held(rows, dataset)
    return SelectedRows(rows, np.flatnonzero(held if dataset.part == "held_out" else ~held))


def question_of(row: Mapping[str, Any], dataset: DatasetConfig) -> Any:
    """Return the prompt of a row, or its messages before the first answer; else the whole row."""

    def column(name: str) -> Any:
        return row.get(dataset.fields.get(name, name))

    for name in ("prompt", *MESSAGES, "question", "instruction", "chosen", "input"):
        value = column(name)
        if name in (*MESSAGES, "chosen"):
            try:
                messages = parse_messages(name, value, dataset.fields)
            except MalformedRow:  # the row is dropped when it is read
                continue
            value = _before_answer(messages, dataset) if isinstance(messages, list) else None
        if value:
            return [value, column("input"), column("system")] if name == "instruction" else value
    return row


def _before_answer(messages: list[Any], dataset: DatasetConfig) -> list[Any]:
    keys = {dataset.fields.get("messages.role", "role"), "from"}
    question = []
    for message in messages:
        named_roles = [message.get(key) for key in keys] if isinstance(message, Mapping) else []
        if any(_answers(role, dataset) for role in named_roles if role is not None):
            break
        question.append(message)
    return question


def _answers(role: Any, dataset: DatasetConfig) -> bool:
    """Return True for a role of the assistant, as messages of rows have it."""
    named = dataset.roles.get(str(role), str(role))
    return ROLES.get(named, named) in ("assistant", "function_call")


def _find_held(rows: Any, dataset: DatasetConfig) -> np.ndarray:
    """Return bool [rows]: True for held-out rows."""
    key = dataset.model_dump_json(include=WHICH)
    cached = _known(key, len(rows))
    if not cached:
        cached.append(divide(rows, dataset))
    return cached[0]


@functools.lru_cache(maxsize=64)
def _known(key: str, count: int) -> list[np.ndarray]:
    """Return a cell that caches the split of such data, which every evaluation opens again."""
    return []


def divide(rows: Any, dataset: DatasetConfig) -> np.ndarray:
    """Return bool [rows]: held-out prompts, taken in the order of their hashes until
    `dataset.held_out` rows are reached."""
    number, share = len(rows), dataset.held_out
    num_held_out = round(share * number) if share < 1 else int(share)
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
    held = (before < num_held_out)[group]
    if not 0 < held.sum() < number:
        side = "no row is left to train on" if held.any() else "none would be held out"
        raise UserError(
            f"{dataset.path}: held_out (or data.validation_split) {share:g} of {number} rows with"
            f" {len(sizes)} prompts: {side}; change it, or name data.eval_datasets"
        )
    return held
