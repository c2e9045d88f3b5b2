"""Rows of a dataset as prompts: columns renamed as its section says; what cannot be read says so.

A row that is unusable stays a row (foreign.UnreadableRow): whoever asks for it counts its episodes as
failed. Only what is wrong with all rows is a UserError, before anything is sampled.
"""

from collections.abc import Mapping
from typing import Any

from jaxtrain.config import DatasetConfig
from jaxtrain.data.chat.messages import MalformedRow, read_messages
from jaxtrain.data.sources.dataset import open_rows
from jaxtrain.errors import UserError
from jaxtrain.safe_io import UnreadableRow
from jaxtrain.text_safety import show


class PromptRows:
    """Rows with random access, each with its wanted columns beside the found ones."""

    def __init__(self, rows: Any, dataset: DatasetConfig, key: str):
        """UserError where a renamed column is in none of the first rows."""
        self.rows, self.dataset = rows, dataset
        self.columns = {w: found for w, found in dataset.fields.items() if "." not in w}
        self.speaks = len(self.columns) < len(dataset.fields) or bool(dataset.roles)
        """Whether messages have keys or roles of other names."""
        check_columns(rows, self.columns, f"{key}.fields", dataset.path)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.rows[index]
        if isinstance(row, UnreadableRow):
            return row
        row = rename(row, self.columns)
        if self.speaks and "messages" in row:
            try:
                row["messages"] = read_messages(
                    row["messages"], self.dataset.fields, self.dataset.roles
                )
            except MalformedRow as error:
                return UnreadableRow(str(error))
        return row


def open_prompts(dataset: DatasetConfig, key: str) -> PromptRows:
    """The prompts of a dataset; `key` is its place in the config. UserError."""
    return PromptRows(open_rows(dataset), dataset, key)


def check_columns(rows: Any, columns: Mapping[str, str], key: str, path: str) -> None:
    """UserError for a renamed column that the first rows do not have."""
    first = [row for row in (rows[i] for i in range(min(len(rows), 16))) if row]
    for wanted, found in columns.items():
        if first and not any(found in row for row in first):
            raise UserError(
                f"{key} names the column {found!r} (for {wanted}), but the columns of {path} are"
                f" {', '.join(map(show, first[0]))}"
            )


def rename(row: Mapping[str, Any], fields: Mapping[str, str]) -> dict[str, Any]:
    """The row with its wanted columns beside the found ones; what is missing stays missing."""
    return {**row, **{wanted: row[found] for wanted, found in fields.items() if found in row}}
