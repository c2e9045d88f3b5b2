"""Views of rows (grouped, selected) and random rows, all with len and getitem."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxtrain.safe_io import UnreadableRow


@dataclass(frozen=True)
class SyntheticTurns:
    """Random caterpillar trees; row i is drawn from seed + i, independently of other rows.

    Each turn draws user length and ids, think length and ids, response length and ids, in this
    order; lengths uniform in their inclusive bounds, ids uniform in [0, vocab_size).
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
    """Rows with equal values of a column, as one row {"group": [...]}, in order of appearance."""

    def __init__(
        self,
        rows: Any,
        column: str | Callable[[dict[str, Any]], str | None],
        most: int | None = None,
    ):
        """Read the column of every row; raises KeyError if it is missing.

        column: name, or a function whose values are equal for rows of a group and None for a row
        that stays alone. most: limit of rows of a group; more rows make several groups.
        """
        self._rows = rows
        self.left_out: dict[str, int] = getattr(rows, "left_out", {})
        members: dict[Any, list[int]] = {}
        for index in range(len(rows)):
            row = rows[index]
            key = None  # an unreadable row stays alone, to be dropped with its own reason
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
        """Return the name of a group in messages: that of its first row."""
        first = self._members[index][0]
        named = getattr(self._rows, "origin", None)
        return named(first) if named else f"row {first}"


class SelectedRows:
    """Some rows of a source, in a given order."""

    def __init__(
        self,
        rows: Any,
        order: Sequence[int] | np.ndarray,
        left_out: Mapping[str, int] | None = None,
    ):
        """left_out: numbers of rows that a selection removed, by reason."""
        self._rows = rows
        # An array is small in a pickle, which every worker process receives; a range is smaller.
        self._order = order if isinstance(order, range) else np.asarray(order, np.int64)
        self.left_out = {**getattr(rows, "left_out", {}), **(left_out or {})}

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._rows[int(self._order[index])]

    def origin(self, index: int) -> str:
        """Return the name of a row in messages: that of the source."""
        named = getattr(self._rows, "origin", None)
        row = int(self._order[index])
        return named(row) if named else f"row {row}"
