"""Optimizer steps of a fixed number of units, for a mean over exactly these units.

The window packer fills rows, and a tree trains in the step that its row falls into. Here a step is
n trees, n branches or n groups. The number of rows varies, so they are padded with empty rows to a
few different numbers.
"""

from collections import Counter
from typing import Any

from jaxtrain.data.counts import Counts, count_items, describe_drops
from jaxtrain.data.packing.pack import fit_rows
from jaxtrain.data.packing.tree import TreeGroup
from jaxtrain.data.packing.window import Sized, TreeReader
from jaxtrain.data.sample import Dropped
from jaxtrain.errors import UserError


class UnitPacker:
    """Iterator of steps, each a list of rows; the cursor is a draw and a position within it."""

    def __init__(self, reader: TreeReader, *, units: int, row_tokens: int, packing: bool = True):
        self._reader, self._units, self._row_tokens = reader, units, row_tokens
        self._packing = packing
        self._begin = reader.state()
        self._skip = 0
        self._pending: list[Any] = []
        self.counts: Counts = Counter()

    def __next__(self) -> list[list[Sized]]:
        """Rows of the next step; StopIteration at the end of the data."""
        pieces: list[Sized] = []
        taken = 0
        while taken < self._units:
            while self._pending and taken < self._units:
                unit = self._pending.pop(0)
                self._skip += 1
                pieces += unit.trees if isinstance(unit, TreeGroup) else [unit]
                taken += 1
            if taken == self._units:
                break
            try:
                self._read()
            except StopIteration:
                break
        if not pieces:
            if not self.counts["trees"]:
                raise UserError(f"no example of the data trains: {describe_drops(self.counts)}")
            raise StopIteration
        sizes = [piece.num_tokens for piece in pieces]
        if self._packing:
            rows = fit_rows(sizes, self._row_tokens)
        else:
            rows = [[index] for index in range(len(pieces))]
        return [[pieces[index] for index in row] for row in rows]

    def state(self) -> dict:
        return {"begin": self._begin, "skip": self._skip, "counts": dict(self.counts)}

    def restore(self, state: dict) -> None:
        self._reader.restore(state["begin"])
        self._begin, self._skip, self._pending = state["begin"], 0, []
        if state["skip"]:
            self._pending = _drop_dropped(next(self._reader))[state["skip"] :]
            self._skip = state["skip"]
        self.counts = Counter(state["counts"])

    def close(self) -> None:
        self._reader.close()

    def _read(self) -> None:
        begin = self._reader.state()
        items = next(self._reader)
        self._begin, self._skip = begin, 0
        self._pending = _drop_dropped(items)
        count_items(self.counts, items, self._reader.pass_len)


def _drop_dropped(items: list[Any]) -> list[Any]:
    return [item for item in items if not isinstance(item, Dropped)]
