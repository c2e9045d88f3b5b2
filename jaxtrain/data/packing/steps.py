"""The data source of offline training: datasets -> trees -> rows -> rounds of one Batch [A, B, T].

    grain workers (num_workers)          one background thread (prefetch)          the loop
    row -> tokenize -> trees    ──>   window -> rows -> Batch [A,B,T]    ──>   next(source)

The workers wait for the thread, the thread for the loop; both queues are bounded. What comes out
depends on the data, the seed and the draw number alone: not on workers, threads or resumes.
"""

import math
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grain
import numpy as np

from jaxtrain.batch import Batch
from jaxtrain.config.data import DataConfig
from jaxtrain.data.counts import Counts, add_items, count_metrics, drops_of
from jaxtrain.data.packing.pack import (
    NLL,
    Fields,
    Normalize,
    PackedTree,
    build_batch,
    lay_out,
    stack_batches,
)
from jaxtrain.data.packing.units import UnitPacker
from jaxtrain.data.packing.window import TreeReader, WindowPacker
from jaxtrain.data.sample import Dropped, to_trees
from jaxtrain.data.sources.readers import (
    STREAM_ROWS,
    IndexedReader,
    MixturePart,
    StreamReader,
    is_stream,
)
from jaxtrain.errors import UserError


@dataclass(frozen=True)
class StepShape:
    """What a step takes from the packer."""

    rows: int
    """B, rows of a microstep."""
    microsteps: int
    """A"""
    row_tokens: int
    """T, the longest row."""
    buckets: tuple[int, ...] = ()
    """Shorter T that a step may be cut to; each one that occurs is one more compilation."""
    normalize: Normalize = "token"
    units: int | None = None
    """Trees (branches, groups, samples) of a step; A then follows from what they fill."""
    fields: Fields = NLL
    """What every batch holds."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Every T that can occur, ascending."""
        return tuple(sorted({*(n for n in self.buckets if n < self.row_tokens), self.row_tokens}))

    def count_microsteps(self, rows: int) -> int:
        """A for so many rows: fixed, or with units the next of 1, 2, 3, 4, 6, 8, 12, 16, ..."""
        if self.units is None:
            return self.microsteps
        wanted, power = max(-(-rows // self.rows), 1), 1
        while 2 * power < wanted:
            power *= 2
        return next(n for n in (power, 3 * power // 2, 2 * power) if n >= wanted)

    def build(self, rows: Sequence[Sequence[PackedTree]]) -> Batch:
        """Batch [A, B, T] of packed rows: the shortest T that holds them, the last rows empty."""
        used = max(sum(len(tree.tokens) for tree in row) for row in rows)
        length = next(n for n in self.lengths if n >= used)
        rows = [*rows, *[[]] * (self.rows * self.count_microsteps(len(rows)) - len(rows))]
        return stack_batches(
            [
                build_batch(rows[start : start + self.rows], length, self.fields)
                for start in range(0, len(rows), self.rows)
            ]
        )


class _StepIterator(grain.DatasetIterator):
    """Batches [A, B, T] from packed rows; its state is JSON-able."""

    def __init__(self, packer: WindowPacker | UnitPacker, shape: StepShape):
        super().__init__()
        self._packer, self._shape = packer, shape
        self._failed = False
        self._totals: dict[str, Any] = {
            "batches": 0,
            "rows": 0,
            "tokens": 0,
            "slots": 0,
            "trained_tokens": 0,
            "shapes": [],
        }

    def __next__(self) -> Batch | UserError:
        if self._failed:
            raise StopIteration
        try:
            return self._next_batch()
        except UserError as error:
            self._failed = True
            return error  # raised by whoever asked: grain adds to the text of what it sees raised

    def _next_batch(self) -> Batch:
        shape = self._shape
        rows = self._next_rows()
        if not rows:
            raise StopIteration
        batch = shape.build([[lay_out(tree, shape.normalize) for tree in row] for row in rows])
        shapes = self._totals["shapes"]
        if list(batch.tokens.shape) not in shapes:
            self._totals["shapes"] = [*shapes, list(batch.tokens.shape)]
        self._totals["batches"] += 1
        self._totals["rows"] += len(rows)
        self._totals["tokens"] += sum(tree.num_tokens for row in rows for tree in row)
        self._totals["slots"] += batch.tokens.size
        trained = np.any([weight != 0 for weight in batch.weights.values()], axis=0)
        self._totals["trained_tokens"] += int(np.count_nonzero(trained))
        return batch

    def _next_rows(self) -> list[list]:
        rows: list[list] = []
        try:
            if isinstance(self._packer, UnitPacker):
                return next(self._packer)
            for _ in range(self._shape.rows * self._shape.microsteps):
                rows.append(next(self._packer))
        except StopIteration:
            pass
        return rows

    def get_state(self) -> dict:
        return {"packer": self._packer.state(), "totals": dict(self._totals)}

    def set_state(self, state: dict) -> None:
        self._failed = False
        self._packer.restore(state["packer"])
        self._totals = dict(state["totals"])

    def close(self) -> None:
        self._packer.close()


def _raise_if_error(item: Batch | UserError) -> Batch:
    if isinstance(item, UserError):
        raise item
    return item


class _Steps(grain.IterDataset):
    """The iterator above as a node of a grain graph."""

    def __init__(self, packer: WindowPacker | UnitPacker, shape: StepShape):
        super().__init__()
        self._packer, self._shape = packer, shape

    def __iter__(self) -> _StepIterator:
        return _StepIterator(self._packer, self._shape)


class BatchSource:
    """Iterator of rounds (lists of one Batch [A, B, T]) with an exact, JSON-able cursor."""

    def __init__(
        self,
        packer: WindowPacker | UnitPacker,
        shape: StepShape,
        *,
        prefetch: int = 2,
        layout: dict[str, Any],
        left_out: int = 0,
    ):
        """`layout` goes into the cursor: a cursor that differs in any of it is refused. left_out:
        rows that were not even to be drawn, for the metrics."""
        self._left_out = {"data/left_out_rows": float(left_out)} if left_out else {}
        self.lengths = shape.lengths
        """Every T that a batch may have: at most so many compilations."""
        self._layout = layout
        iterator = iter(
            grain.experimental.ThreadPrefetchIterDataset(
                _Steps(packer, shape), prefetch_buffer_size=prefetch
            )
        )
        # Closed and let go at the exit of Python as well, while the modules that grain's own
        # __del__ needs still exist.
        self._held = [iterator]
        self._finalizer = weakref.finalize(self, _close, self._held)

    @property
    def _iterator(self) -> grain.DatasetIterator:
        if not self._held:
            raise ValueError("the data source is closed")
        return self._held[0]

    def __iter__(self) -> "BatchSource":
        return self

    def __next__(self) -> list[Batch]:
        return [_raise_if_error(next(self._iterator))]

    def state(self) -> dict:
        """Cursor after the last round that came out; see restore."""
        return {"layout": self._layout, **self._iterator.get_state()}

    def restore(self, state: dict) -> None:
        """Go on with exactly the round that would have followed. UserError if the data changed."""
        changed = [
            f"{key}: {state['layout'].get(key)} then, {value} now"
            for key, value in self._layout.items()
            if state["layout"].get(key) != value
        ]
        if changed:
            raise UserError(
                f"the data differ from those of the checkpoint ({'; '.join(changed)}), so its place"
                ' in them means nothing; restore the data or start with run.resume = "never"'
            )
        self._iterator.set_state({key: state[key] for key in ("packer", "totals")})

    def counters(self) -> dict:
        """rows_read, samples, dropped by reason, counts and the same as metrics (see tally.py);
        tokens, trained_tokens, packing_efficiency, and batch_shapes: how many shapes of a batch
        there were, each of which is compiled once."""
        state = self._iterator.get_state()
        counts, totals = state["packer"]["counts"], state["totals"]
        return {
            "rows_read": counts.get("draws", 0),
            "samples": counts.get("trees", 0),
            "dropped": drops_of(counts),
            "counts": counts,
            "metrics": {**count_metrics(counts), **self._left_out},
            "tokens": totals["tokens"],
            "trained_tokens": totals["trained_tokens"],
            "batch_shapes": len(totals["shapes"]),
            "packing_efficiency": totals["tokens"] / max(totals["slots"], 1),
        }

    def close(self) -> None:
        """Stop the thread and the workers."""
        self._finalizer()


def _close(held: list) -> None:
    while held:
        try:
            held.pop().close()
        except RuntimeError as error:
            # Collected as garbage by its own thread, which cannot wait for itself: it was told to
            # stop, and does.
            if "current thread" not in str(error):
                raise


def open_parts(
    parts: Sequence[MixturePart],
    data: DataConfig,
    *,
    seed: int,
    rows_per_microstep: int,
    microsteps: int,
    num_epochs: float | None = None,
    normalize: Normalize = "token",
    row_tokens: int | None = None,
    units: int | None = None,
    fields: Fields = NLL,
) -> BatchSource:
    """Source over opened datasets; without num_epochs it never ends.

    row_tokens: T where it is not data.sequence_len. units: trees of a step, which then fill as many
    microsteps as they need; microsteps does not count. fields: what every batch holds.
    """
    row_tokens = row_tokens or data.sequence_len
    shape = StepShape(
        rows_per_microstep,
        microsteps,
        row_tokens,
        tuple(data.length_buckets),
        normalize,
        units,
        fields,
    )
    streamed = any(is_stream(part.rows) for part in parts)
    if streamed and num_epochs is not None:
        raise UserError("run.num_epochs needs datasets with a length; set run.max_steps instead")
    common = {"row_tokens": row_tokens, "seed": seed, "shuffle": data.shuffle}
    if streamed:
        reader = StreamReader(parts, shuffle_buffer=data.shuffle_buffer, **common)
    else:
        reader = IndexedReader(parts, num_epochs=num_epochs, num_workers=data.num_workers, **common)
    layout = {
        "datasets": [part.name for part in parts],
        "rows": [None if is_stream(part.rows) else len(part.rows) for part in parts],
        "weights": [part.weight for part in parts],
        "seed": seed,
        "shuffle": data.shuffle,
        "row_tokens": row_tokens,
        "units": units,
        "packing": data.packing,
        "packing_window": data.packing_window,
    }
    packer = _open_packer(reader, data, seed, row_tokens, units)
    left_out = sum(sum(part.left_out.values()) for part in parts)
    return BatchSource(packer, shape, prefetch=data.prefetch, layout=layout, left_out=left_out)


def _open_packer(
    reader: TreeReader, data: DataConfig, seed: int, row_tokens: int, units: int | None = None
) -> WindowPacker | UnitPacker:
    if units is not None:
        return UnitPacker(reader, units=units, row_tokens=row_tokens, packing=data.packing)
    return WindowPacker(
        reader,
        row_tokens=row_tokens,
        window=data.packing_window,
        packing=data.packing,
        shuffle=data.shuffle,
        seed=seed,
    )


@dataclass(frozen=True)
class _Length:
    """Stands for a tree where only its size matters."""

    num_tokens: int
    flat_tokens: int
    controls: int


def _measure(item: Any) -> _Length:
    flat = getattr(item, "flat_tokens", item.num_tokens)
    return _Length(item.num_tokens, flat, item.controls)


def measure_lengths(
    part: MixturePart, data: DataConfig, row_tokens: int
) -> list[list[_Length | Dropped]]:
    """Tokenize every row once; sizes of what each became."""
    options = {"row_tokens": row_tokens, "shuffle": False, "num_epochs": 1}
    reader = IndexedReader([part], num_workers=data.num_workers, **options)
    lengths = [
        [item if isinstance(item, Dropped) else _measure(item) for item in items]
        for items in iter(lambda: next(reader, None), None)
    ]
    reader.close()
    return lengths


def count_part(part: MixturePart, row_tokens: int, seconds: float) -> tuple[Counts, bool]:
    """Counts of what the rows of `part` become, in order; and whether those are all its rows and
    not as many as were read in `seconds`."""
    counts: Counts = Counter()
    began = time.monotonic()
    limit = STREAM_ROWS if is_stream(part.rows) else math.inf
    for index, (row, origin) in enumerate(part.numbered_rows()):
        if time.monotonic() - began > seconds or index == limit:
            return counts, False
        add_items(counts, to_trees(part.tokenize(row, origin), row_tokens))
    return counts, True


def plan_part_steps(
    parts: Sequence[MixturePart],
    data: DataConfig,
    *,
    seed: int,
    rows_per_microstep: int,
    microsteps: int,
    num_epochs: float = 1.0,
    row_tokens: int | None = None,
    units: int | None = None,
) -> tuple[int, Counts]:
    """Optimizer steps of `num_epochs`, exactly those that open_parts will yield; and the counts of
    all that was read for them."""
    row_tokens = row_tokens or data.sequence_len
    if units is not None:  # only how many there are matters, and a group has no row of its own
        data = data.model_copy(update={"packing": False})
    sized = [
        MixturePart(part.name, measure_lengths(part, data, row_tokens), _pass_on, part.weight)
        for part in parts
    ]
    reader = IndexedReader(
        sized, row_tokens=row_tokens, seed=seed, shuffle=data.shuffle, num_epochs=num_epochs
    )
    packer = _open_packer(reader, data, seed, row_tokens, units)
    found = sum(1 for _ in iter(lambda: next(packer, None), None))
    per_step = 1 if isinstance(packer, UnitPacker) else rows_per_microstep * microsteps
    return -(-found // per_step), packer.counts


def _pass_on(row: list, origin: str) -> list:
    return row


def eval_part_batches(
    part: MixturePart,
    data: DataConfig,
    *,
    rows: int,
    row_tokens: int | None = None,
    fields: Fields = NLL,
    normalize: Normalize = "token",
    done: Callable[[Counts], None] = lambda counts: None,
) -> Iterator[Batch]:
    """Batches [1, B, T] of every row of `part` once, in order; the last one is padded.

    done: gets the counts of what was read, also where nobody takes the rest.
    """
    row_tokens = row_tokens or data.sequence_len
    options = {"row_tokens": row_tokens, "shuffle": False}
    if is_stream(part.rows):
        reader = StreamReader([part], once=True, **options)
    else:
        reader = IndexedReader([part], num_epochs=1, **options)
    quiet = data.model_copy(update={"shuffle": False})
    buckets = tuple(data.length_buckets)
    shape = StepShape(rows, 1, row_tokens, buckets, normalize=normalize, fields=fields)
    packer = _open_packer(reader, quiet, 0, row_tokens)
    iterator = _StepIterator(packer, shape)
    try:
        for batch in iterator:
            yield _raise_if_error(batch)
    finally:
        done(packer.counts)
        iterator.close()
