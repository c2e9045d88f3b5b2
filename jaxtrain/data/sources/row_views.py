"""Rows made of rows, and rows made of chance: all with len and getitem."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxtrain.safe_io import UnreadableRow


@dataclass(frozen=True)
class SyntheticTurns:
    """Random caterpillars: row i is drawn from seed + i, so any row can be had alone.

    For each turn, in order: user length, user ids, think length, ids, response length, ids; lengths
    uniform in their inclusive bounds, ids uniform in [0, vocab_size).
    """

    vocab_size: int
    num_rows: int = 10_000
    num_turns: int = 3
    user_len: tuple[int, int] = (4, 4)
    think_len: tuple[int, int] = (6, 6)
    response_len: tuple[int, int] = (6, 6)
    seed: int = 0

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self.num_rows:
            raise IndexError(index)
        rng = np.random.default_rng(self.seed + index)
        turns = []
        for _ in range(self.num_turns):
            parts = []
            for low, high in (self.user_len, self.think_len, self.response_len):
                length = rng.integers(low, high + 1)
                parts.append(rng.integers(0, self.vocab_size, length).astype(np.int32))
            turns.append(tuple(parts))
        return {"turns": turns}


class GroupedRows:
    """Rows that share the value of a column, as one row {"group": [...]}; first seen first."""

    def __init__(
        self,
        rows: Any,
        column: str | Callable[[dict[str, Any]], str | None],
        most: int | None = None,
    ):
        """Reads the column of every row once; raises KeyError without it. column: or what is equal
        for the rows of one group, None for a row that stays alone. most: rows of a group, if there
        are more of them they make several."""
        self._rows = rows
        self.left_out: dict[str, int] = getattr(rows, "left_out", {})
        members: dict[Any, list[int]] = {}
        for index in range(len(rows)):
            row = rows[index]
            key = None  # what cannot be read is dropped under its own reason
            if not isinstance(row, UnreadableRow):
                key = column(row) if callable(column) else str(row[column])
            members.setdefault(f"\0{index}" if key is None else key, []).append(index)
        self._members = [
            group[start : start + (most or len(group))]
            for group in members.values()
            for start in range(0, len(group), most or len(group))
        ]

    def __len__(self) -> int:
        return len(self._members)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"group": [self._rows[i] for i in self._members[index]]}

    def origin(self, index: int) -> str:
        """Name of a group in messages: that of its first row."""
        first = self._members[index][0]
        named = getattr(self._rows, "origin", None)
        return named(first) if named else f"row {first}"


class SelectedRows:
    """Some rows of others, in a given order."""

    def __init__(self, rows: Any, order: Sequence[int], left_out: Mapping[str, int] | None = None):
        """left_out: how many of the others were left out, by reason."""
        self._rows, self._order = rows, list(order)
        self.left_out = {**getattr(rows, "left_out", {}), **(left_out or {})}

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._rows[self._order[index]]

    def origin(self, index: int) -> str:
        """Name of a row in messages: that of the row behind it."""
        named = getattr(self._rows, "origin", None)
        return named(self._order[index]) if named else f"row {self._order[index]}"
