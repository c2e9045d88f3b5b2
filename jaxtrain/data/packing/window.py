"""Packers of trees into rows with an exact cursor: from a look-ahead window, or by units.

    reader ──trees──> window n (W trees) ──first-fit-decreasing──> rows ──> emitted one by one
                         ^                                          │
                         └──── the emptiest row opens window n+1 ───┘

A carried row is emitted with the window that it opens, so that nothing waits longer than two
windows and a cursor is small: the beginning of the previous window, its carried trees, and the
number of rows emitted from the present one. Restoring a cursor reads both windows again.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from jaxtrain.data.counts import Counts, count_items, describe_drops
from jaxtrain.data.packing.pack import fit_rows
from jaxtrain.data.packing.tree import TreeGroup
from jaxtrain.data.sample import RowNote
from jaxtrain.errors import UserError


class Sized(Protocol):
    """Interface of a tree to the packer."""

    @property
    def num_tokens(self) -> int: ...
    @property
    def num_patches(self) -> int:
        """Patches of its images; asked where rows have a limit of them."""
        ...


class TreeReader(Protocol):
    """Source of trees: see readers.py."""

    @property
    def pass_len(self) -> int | None: ...
    @property
    def repeated(self) -> bool: ...
    def __next__(self) -> list: ...
    def state(self) -> dict: ...
    def restore(self, state: dict) -> None: ...
    def close(self) -> None: ...


class WindowPacker:
    """Iterator of rows, each a list of trees that fit in `row_tokens` together."""

    def __init__(
        self,
        reader: TreeReader,
        *,
        row_tokens: int,
        window: int = 256,
        row_patches: int | None = None,
        packing: bool = True,
        shuffle: bool = True,
        seed: int = 0,
    ):
        """row_patches: limit of a row's images; None: rows have none. packing False: one tree per
        row. shuffle: emit the rows of a window in random order, because first-fit-decreasing builds
        those with long trees first."""
        self._reader, self._row_tokens, self._window = reader, row_tokens, window
        self._row_patches = row_patches
        self._packing, self._shuffle, self._seed = packing, shuffle, seed
        self._begin = reader.state()
        self._begin_draws = 0
        self._carried: list[tuple[int, int, Sized]] = []
        self._number = -1
        self._rows: list[list[Sized]] = []
        self._emitted = 0
        self._final = False
        self._next: tuple[dict, int, list[tuple[int, int, Sized]]] = (self._begin, 0, [])
        self.counts = Counts()
        """Counts of everything read so far: see counts.count_items."""

    def __next__(self) -> list[Sized]:
        while self._emitted == len(self._rows):
            if self._final:
                raise StopIteration
            self._begin, self._begin_draws, self._carried = self._next
            self._number += 1
            self._fill()
        self._emitted += 1
        return self._rows[self._emitted - 1]

    def state(self) -> dict:
        return {
            "begin": self._begin,
            "draws": self._begin_draws,
            "carried": [[draw, item] for draw, item, _ in self._carried],
            "window": self._number,
            "emitted": self._emitted,
            **self.counts.state(),
        }

    def restore(self, state: dict) -> None:
        """Read the previous and the present window again, up to the next row to emit."""
        self._reader.restore(state["begin"])
        self._begin, self._begin_draws = state["begin"], state["draws"]
        self._number, self._final = state["window"], False
        carried_keys = [tuple(pair) for pair in state["carried"]]
        carried_trees = {}
        for draw in range(state["draws"]):
            for item, tree in enumerate(next(self._reader)):
                if (draw, item) in carried_keys:
                    carried_trees[draw, item] = tree
        if carried_trees.keys() != set(carried_keys):
            raise UserError(
                "the data do not give what they gave when the checkpoint was written; restore the"
                ' data and the version of jaxtrain, or start with run.resume = "never"'
            )
        self._carried = [(*pair, carried_trees[pair]) for pair in carried_keys]
        self._rows, self._emitted = [], 0
        if self._number >= 0:
            self._fill(replay=True)
        else:
            self._next = (self._begin, 0, [])
        self._emitted = state["emitted"]
        self.counts = Counts.restore(state)

    def close(self) -> None:
        self._reader.close()

    def _fill(self, replay: bool = False) -> None:
        """Read one window and pack its rows; a replay is not counted again."""
        own_begin = self._reader.state()
        trees = list(self._carried)
        tokens = sum(tree.num_tokens for *_, tree in trees)
        draws = 0
        # At least the tokens of two rows, so that one can be carried and another emitted.
        while len(trees) < self._window or (self._packing and tokens < 2 * self._row_tokens):
            try:
                items = next(self._reader)
            except StopIteration:
                self._final = True
                break
            for index, item in enumerate(items):
                if not isinstance(item, RowNote):
                    trees.append((draws, index, item))
                    tokens += item.num_tokens
            draws += 1
            if not replay:
                count_items(self.counts, items, self._reader.pass_len, self._reader.repeated)
        rows = self._arrange([tree for *_, tree in trees], len(self._carried))
        opening = bool(self._carried)
        carry: list[int] = []
        if self._packing and not self._final and len(rows) > opening:
            used = [sum(trees[i][2].num_tokens for i in row) for row in rows]
            carry = rows.pop(int(np.argmin(used[opening:])) + opening)
        self._next = (own_begin, draws, [trees[i] for i in carry])
        if self._shuffle and self._packing:
            order = np.random.default_rng((self._seed, 2, self._number)).permutation(len(rows))
            rows = [rows[i] for i in order]
        else:
            rows.sort(key=min)
        self._rows = [[trees[i][2] for i in sorted(row)] for row in rows]
        self._emitted = 0
        if self._final and not replay and not self.counts["trees"]:
            raise UserError(f"no example of the data trains: {describe_drops(self.counts)}")

    def _arrange(self, trees: Sequence[Sized], num_carried: int) -> list[list[int]]:
        if not self._packing:
            return [[index] for index in range(len(trees))]
        return fit_trees(trees, self._row_tokens, self._row_patches, range(num_carried))


def fit_trees(
    trees: Sequence[Sized], row_tokens: int, row_patches: int | None, opened: Sequence[int] = ()
) -> list[list[int]]:
    """Assign trees to rows by first fit decreasing: see pack.fit_rows."""
    lengths = [tree.num_tokens for tree in trees]
    if row_patches is None:
        return fit_rows(lengths, row_tokens, opened)
    patches = [tree.num_patches for tree in trees]
    return fit_rows(lengths, row_tokens, opened, (patches, row_patches))


class UnitPacker:
    """Iterator of optimizer steps of a fixed number of units, for a mean over exactly these units.

    A step, a list of rows, holds n trees, n branches or n groups; the number of its rows varies, so
    they are padded with empty rows to a few different numbers. The cursor is a draw and a position
    within it.
    """

    def __init__(
        self,
        reader: TreeReader,
        *,
        units: int,
        row_tokens: int,
        row_patches: int | None = None,
        packing: bool = True,
    ):
        self._reader, self._units, self._row_tokens = reader, units, row_tokens
        self._packing, self._row_patches = packing, row_patches
        self._begin = reader.state()
        self._skip = 0
        self._pending: list[Any] = []
        self.counts = Counts()

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
        if self._packing:
            rows = fit_trees(pieces, self._row_tokens, self._row_patches)
        else:
            rows = [[index] for index in range(len(pieces))]
        return [[pieces[index] for index in row] for row in rows]

    def state(self) -> dict:
        return {"begin": self._begin, "skip": self._skip, **self.counts.state()}

    def restore(self, state: dict) -> None:
        self._reader.restore(state["begin"])
        self._begin, self._skip, self._pending = state["begin"], 0, []
        if state["skip"]:
            self._pending = _without_notes(next(self._reader))[state["skip"] :]
            self._skip = state["skip"]
        self.counts = Counts.restore(state)

    def close(self) -> None:
        self._reader.close()

    def _read(self) -> None:
        begin = self._reader.state()
        items = next(self._reader)
        self._begin, self._skip = begin, 0
        self._pending = _without_notes(items)
        count_items(self.counts, items, self._reader.pass_len, self._reader.repeated)


def _without_notes(items: list[Any]) -> list[Any]:
    return [item for item in items if not isinstance(item, RowNote)]
