"""Readers: draws of tokenized rows, in an order that a small cursor determines.

IndexedReader reads datasets with a length and can tokenize in worker processes. StreamReader reads
iterables block by block. Both yield the list of samples and drops of each draw.
"""

import copy
import itertools
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxtrain.data.packing.tree import Forest, Tree, TreeGroup
from jaxtrain.data.sample import RowNote, Sample, to_trees
from jaxtrain.data.sources.order import Order
from jaxtrain.errors import UserError

Tokenize = Callable[[Any, str], Sequence[Sample | Tree | Forest | TreeGroup | RowNote]]
Items = list[Tree | Forest | TreeGroup | RowNote]

CHUNK = 16
"""Draws sent between processes together, because the queue costs as much as a short row."""
MAX_USELESS = 2**16
"""Limit of rows without samples that are remembered."""

STREAM_ROWS = 1000
"""Rows of a stream that `preprocess` reads."""


@dataclass(frozen=True)
class MixturePart:
    """An open dataset of the mixture."""

    name: str
    """Path of the dataset, for messages and origins."""
    rows: Any
    """Rows with len and getitem, or an iterable that can be iterated repeatedly."""
    tokenize: Tokenize
    """(row, origin) -> samples, trees or drops. Picklable, for worker processes."""
    weight: float | None = None
    """Share of the draws; if None for all parts, every row is drawn once per epoch."""

    @property
    def left_out(self) -> dict[str, int]:
        """Rows that a selection removed, by reason."""
        return dict(getattr(self.rows, "left_out", {}))

    def origin(self, index: int) -> str:
        """Return the name of a row in messages: as its source names it, or by its number."""
        named = getattr(self.rows, "origin", None)
        return named(index) if named else f"{self.name} row {index}"

    def numbered_rows(self) -> Iterator[tuple[Any, str]]:
        """Yield each row with its origin, in order."""
        if is_stream(self.rows):
            for index, row in enumerate(self.rows):
                yield row, f"{self.name} row {index}"
        else:
            for index in range(len(self.rows)):
                yield self.rows[index], self.origin(index)


@dataclass(frozen=True)
class _Failure:
    """UserError of a worker process, raised again in the main process, without grain's
    additions."""

    message: str


@dataclass(frozen=True)
class _Rows:
    """grain source of chunks: samples and drops of draws start + 16 i to start + 16 (i + 1)."""

    parts: Sequence[MixturePart]
    order: Order
    row_tokens: int
    row_patches: int | None
    start: int
    stop: int
    useless: dict[tuple[int, int], Sequence[RowNote]] = field(default_factory=dict)
    """Notes of rows without samples, by dataset and row, at most MAX_USELESS: otherwise a small
    dataset with a huge row that does not train would tokenize it in every pass."""

    def __len__(self) -> int:
        return -(-max(self.stop - self.start, 0) // CHUNK)

    def __getitem__(self, chunk: int) -> list[Items] | _Failure:
        first = self.start + int(chunk) * CHUNK
        done = []
        for draw in range(first, min(first + CHUNK, self.stop)):
            dataset, row = key = self.order[draw]
            part = self.parts[dataset]
            if (empty_drops := self.useless.get(key)) is not None:
                done.append(list(empty_drops))
                continue
            try:
                items = part.tokenize(part.rows[row], part.origin(row))
            except UserError as error:
                return _Failure(str(error))
            notes = [item for item in items if isinstance(item, RowNote)]
            if len(notes) == len(items) and len(self.useless) < MAX_USELESS:
                self.useless[key] = notes
            done.append(to_trees(items, self.row_tokens, row_patches=self.row_patches))
        return done


class IndexedReader:
    """Draws from datasets with a length; cursor {"draws": n}."""

    def __init__(
        self,
        parts: Sequence[MixturePart],
        *,
        row_tokens: int,
        row_patches: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        num_epochs: float | None = None,
        num_workers: int = 0,
    ):
        for part in parts:
            if len(part.rows) == 0:
                raise UserError(f"{part.name} has no rows")
        sizes = [len(part.rows) for part in parts]
        self._parts = parts
        self._row_tokens, self._row_patches = row_tokens, row_patches
        self._order = Order(sizes, [part.weight for part in parts], seed=seed, shuffle=shuffle)
        self._num_workers = num_workers
        # An endless reader stops at a number that no run reaches and that grain can still slice.
        self._stop = 2**50 if num_epochs is None else round(self._order.epoch_len * num_epochs)
        self.pass_len = self._order.pass_len
        """Number of draws after which every row was seen."""
        self._drawn = 0
        self.repeated = False
        """True if the row of the last draw was drawn before."""
        self._chunks: Any = None
        self._pending: Iterator[Items] = iter(())

    def __next__(self) -> Items:
        for items in self._pending:
            self.repeated = self._order.visit(self._drawn) > 0
            self._drawn += 1
            return items
        if self._chunks is None:
            self._chunks = self._open()
        chunk = next(self._chunks)
        if isinstance(chunk, _Failure):
            raise UserError(chunk.message)
        self._pending = iter(chunk)
        return next(self)

    def state(self) -> dict:
        return {"draws": self._drawn}

    def restore(self, state: dict) -> None:
        self.close()
        self._drawn = state["draws"]

    def close(self) -> None:
        if self._chunks is not None:
            self._chunks.close()
        self._chunks, self._pending = None, iter(())

    def _open(self) -> Any:
        """Return an iterator of chunks with close()."""
        limits = (self._row_tokens, self._row_patches)
        rows = _Rows(self._parts, self._order, *limits, self._drawn, self._stop)
        if not self._num_workers:
            return (rows[chunk] for chunk in range(len(rows)))
        return _open_workers(rows, self._num_workers)


def _open_workers(rows: Any, num_workers: int) -> Any:
    """Read chunks in worker processes."""
    # With Orbax, which it imports, a second of the start of a run without workers.
    import grain
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()  # grain reads absl flags, which fail if never parsed
    reading = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    workers = grain.MultiprocessingOptions(num_workers=num_workers, per_worker_buffer_size=4)
    chunks = grain.MapDataset.source(rows).to_iter_dataset(reading)
    return iter(chunks.mp_prefetch(workers, _leave_interrupts))


def _leave_interrupts(worker: int, num_workers: int) -> None:
    """Ignore in a worker what asks to stop: Ctrl-C, `timeout` and schedulers of jobs signal whole
    process groups, but only the training loop handles it, and then ends the workers. One that ended
    within a write would leave a queue on which that waits."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


class _Stream:
    """Rows of an iterable, shuffled within blocks; starts over when exhausted.

    The cursor is the beginning of a block and an offset in it. Restoring it uses the dataset's
    state_dict (Hugging Face's IterableDataset), or else reads and skips rows.
    """

    def __init__(self, part: MixturePart, *, seed: tuple[int, ...], block: int, shuffle: bool):
        self._part, self._seed, self._block_size, self._shuffle = part, seed, block, shuffle
        self._rows = part.rows
        self._initial: dict | None = self._source_state()
        self.pass_len: int | None = None
        self._begin: dict = {"visit": 0, "rows": 0, "source": None}
        self._seek(self._begin)

    def state(self) -> dict:
        return {**self._begin, "offset": self._offset, "pass_len": self.pass_len}

    def restore(self, state: dict) -> None:
        self.pass_len = state["pass_len"]
        self._seek({key: state[key] for key in ("visit", "rows", "source")})
        if state["offset"]:
            self._read_block()
            self._offset = state["offset"]

    def next_row(self, once: bool = False) -> tuple[dict, str]:
        """Return the next row and its origin; with `once`, StopIteration at the end of a pass."""
        while self._offset == len(self._block):
            if self._exhausted:
                if once:
                    raise StopIteration
                self._seek({"visit": self._begin["visit"] + 1, "rows": 0, "source": None})
            elif self._block:
                self._begin = {**self._begin, "rows": self._read, "source": self._source_state()}
            self._read_block()
        index = int(self._permutation[self._offset])
        self._offset += 1
        return self._block[index], f"{self._part.name} row {self._begin['rows'] + index}"

    @property
    def visit(self) -> int:
        """Number of the pass over the rows, from 0."""
        return self._begin["visit"]

    def _seek(self, begin: dict) -> None:
        self._begin, self._block, self._offset = begin, [], 0
        self._exhausted, self._read = False, begin["rows"]
        # A Hugging Face stream keeps a loaded position across iterators, so each pass loads one.
        if self._initial is not None:
            self._rows.load_state_dict(begin["source"] or self._initial)
        self._iterator = iter(self._rows)
        if begin["source"] is None and begin["rows"]:
            next(itertools.islice(self._iterator, begin["rows"] - 1, None), None)

    def _source_state(self) -> dict | None:
        return copy.deepcopy(self._rows.state_dict()) if hasattr(self._rows, "state_dict") else None

    def _read_block(self) -> None:
        self._block = list(itertools.islice(self._iterator, self._block_size))
        self._offset = 0
        self._read += len(self._block)
        if len(self._block) < self._block_size:
            self._exhausted = True
            self.pass_len = self._read
            if self._read == 0:
                raise UserError(f"{self._part.name} has no rows")
        self._permutation = np.arange(len(self._block))
        if self._shuffle:
            key = (*self._seed, self._begin["visit"], self._begin["rows"])
            np.random.default_rng(key).shuffle(self._permutation)


class StreamReader:
    """Draws from iterables (or from both kinds) by weight; the cursor has a part per dataset."""

    def __init__(
        self,
        parts: Sequence[MixturePart],
        *,
        row_tokens: int,
        row_patches: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        shuffle_buffer: int = 10_000,
        once: bool = False,
    ):
        assert not once or len(parts) == 1, "only a single stream has an end"
        self._parts, self._row_tokens, self._once = parts, row_tokens, once
        self._row_patches = row_patches
        self._weights = np.array([1.0 if p.weight is None else p.weight for p in parts])
        self._weights /= self._weights.sum()
        block = shuffle_buffer if shuffle else min(shuffle_buffer, 64)
        self._streams = [
            _Stream(part, seed=(seed, index), block=block, shuffle=shuffle)
            for index, part in enumerate(parts)
        ]
        self._drawn = np.zeros(len(parts), np.int64)
        self.repeated = False
        """True if the row of the last draw was drawn before."""

    def __next__(self) -> Items:
        draw = int(self._drawn.sum())
        dataset = int(np.argmax(self._weights * (draw + 1) - self._drawn))
        row, origin = self._streams[dataset].next_row(self._once)
        self.repeated = self._streams[dataset].visit > 0
        self._drawn[dataset] += 1
        items = self._parts[dataset].tokenize(row, origin)
        return to_trees(items, self._row_tokens, row_patches=self._row_patches)

    @property
    def pass_len(self) -> int | None:
        """Number of draws in which every row was seen; None until all streams have ended once."""
        lengths = [stream.pass_len for stream in self._streams]
        if any(length is None for length in lengths):
            return None
        longest = max(n / w for n, w in zip(lengths, self._weights, strict=True))
        return int(np.ceil(longest)) + len(lengths)

    def state(self) -> dict:
        return {
            "drawn": self._drawn.tolist(),
            "streams": [stream.state() for stream in self._streams],
        }

    def restore(self, state: dict) -> None:
        self._drawn = np.array(state["drawn"], np.int64)
        for stream, saved in zip(self._streams, state["streams"], strict=True):
            stream.restore(saved)

    def close(self) -> None:
        """Do nothing: streams hold no resources."""


def is_stream(rows: Any) -> bool:
    """Return True for rows that can only be iterated."""
    return not (hasattr(rows, "__len__") and hasattr(rows, "__getitem__")) and isinstance(
        rows, Iterable
    )


def keep_items(items: Items, origin: str) -> Items:
    """Return rows that are tokenized already: a `Tokenize` for cached data."""
    return items
