"""From the datasets of a config to batches: section `data` and a method's recipe become a source.

row ──recipe.open──> samples, trees ──packing──> rows ──> rounds of one Batch [A, B, T]
"""

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rich.console import Console

from jaxtrain.batch import Batch
from jaxtrain.config.data import DataConfig, DatasetConfig
from jaxtrain.data.counts import Counts, add_items
from jaxtrain.data.packing.pack import Fields, Normalize
from jaxtrain.data.packing.steps import BatchSource, StepIterator, StepShape
from jaxtrain.data.packing.window import TreeReader, UnitPacker, WindowPacker
from jaxtrain.data.sample import RowNote, to_trees
from jaxtrain.data.sources.readers import (
    STREAM_ROWS,
    IndexedReader,
    MixturePart,
    StreamReader,
    is_stream,
    keep_items,
)
from jaxtrain.errors import UserError


class Recipe(Protocol):
    """A method's way from rows of a dataset to trees, and from trees to the rows of a step."""

    row_tokens: int
    """T."""
    normalize: Normalize
    """Divisor of the weights of a tree: see pack.lay_out."""
    held_out_normalize: Normalize
    """Divisor for held-out data."""
    units: int | None
    """Trees of an optimizer step; replaces a fixed number of microsteps."""
    fields: Fields
    """Weights and other per-token arrays of every batch."""

    def open(self, dataset: DatasetConfig) -> MixturePart:
        """Open a dataset, with the function that makes samples or trees of its rows."""
        ...

    def open_held_out(self, dataset: DatasetConfig) -> MixturePart:
        """Open a held-out dataset."""
        ...

    def settings(self, dataset: DatasetConfig) -> str | None:
        """Return all settings that shape the samples of a row, for the cache; None: not cached."""
        ...

    def probe(self, dataset: DatasetConfig) -> Any:
        """Read a few rows; UserError if they would not train. str() of it is a line or two."""
        ...

    def show(self, dataset: DatasetConfig, num_samples: int, console: Console) -> None:
        """Print samples, counts of all rows, and drops by reason, for the verb preprocess."""
        ...

    def show_example(self, probe: Any, console: Console) -> None:
        """Print the first example of a probe."""
        ...


def open_source(
    data: DataConfig,
    recipe: Recipe,
    *,
    seed: int,
    rows_per_microstep: int,
    microsteps: int,
    num_epochs: float | None = None,
    opened: Sequence[MixturePart] | None = None,
) -> BatchSource:
    """Open a source of rounds [Batch [A, B, T]] over data.datasets, seeded and exactly resumable.

    Without num_epochs it never ends; with it the last batch is padded with empty rows. opened: the
    datasets, if they are open already. Raises UserError for data that cannot be read or of which
    nothing trains.
    """
    parts = opened or [recipe.open(dataset) for dataset in data.datasets]
    row_tokens, units, row_patches = recipe.row_tokens, recipe.units, limit_patches(recipe)
    if longer := [size for size in data.length_buckets if size > row_tokens]:
        print(
            f"data.length_buckets {longer[0]:,} is above {row_tokens:,}, the tokens of a row:"
            " no row needs it",
            file=sys.stderr,
            flush=True,
        )
    shape = StepShape(
        rows_per_microstep,
        microsteps if units is None else None,
        row_tokens,
        tuple(data.length_buckets),
        recipe.normalize,
        recipe.fields,
    )
    streamed = any(is_stream(part.rows) for part in parts)
    if streamed and num_epochs is not None:
        raise UserError("run.num_epochs needs datasets with a length; set run.max_steps instead")
    limits = {"row_tokens": row_tokens, "row_patches": row_patches}
    common = {**limits, "seed": seed, "shuffle": data.shuffle}
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
        **{name: limit for name, limit in limits.items() if limit is not None},
        "units": units,
        "packing": data.packing,
        "packing_window": data.packing_window,
    }
    packer = _open_packer(reader, data, seed, limits, units)
    left_out = sum(sum(part.left_out.values()) for part in parts)
    return BatchSource(packer, shape, prefetch=data.prefetch, layout=layout, left_out=left_out)


def plan_steps(
    data: DataConfig,
    recipe: Recipe,
    *,
    seed: int,
    rows_per_microstep: int,
    microsteps: int,
    num_epochs: float = 1.0,
    opened: Sequence[MixturePart] | None = None,
) -> tuple[int, Counts]:
    """Return the number of optimizer steps that open_source(num_epochs=...) yields, and the counts
    of all rows read for them. Every row is tokenized once."""
    parts = opened or [recipe.open(dataset) for dataset in data.datasets]
    row_tokens, units, row_patches = recipe.row_tokens, recipe.units, limit_patches(recipe)
    if units is not None:  # only the number of trees matters, and a group has no row of its own
        data = data.model_copy(update={"packing": False})
    sized = [
        MixturePart(
            part.name, measure_lengths(part, data, row_tokens, row_patches), keep_items, part.weight
        )
        for part in parts
    ]
    reader = IndexedReader(
        sized, row_tokens=row_tokens, seed=seed, shuffle=data.shuffle, num_epochs=num_epochs
    )
    limits = {"row_tokens": row_tokens, "row_patches": row_patches}
    packer = _open_packer(reader, data, seed, limits, units)
    num_outputs = sum(1 for _ in iter(lambda: next(packer, None), None))
    per_step = 1 if isinstance(packer, UnitPacker) else rows_per_microstep * microsteps
    return -(-num_outputs // per_step), packer.counts


def eval_batches(
    dataset: DatasetConfig,
    data: DataConfig,
    recipe: Recipe,
    rows: int,
    done: Callable[[Counts], None] = lambda counts: None,
    opened: MixturePart | None = None,
) -> Iterator[Batch]:
    """Yield batches [1, B, T] of every row of a held-out dataset once, in order; the last is
    padded.

    done: called with the counts of what was read, also if the iterator is closed early. opened: the
    dataset, if it is open already.
    """
    part = opened or recipe.open_held_out(dataset)
    limits = {"row_tokens": recipe.row_tokens, "row_patches": limit_patches(recipe)}
    options = {**limits, "shuffle": False}
    if is_stream(part.rows):
        reader = StreamReader([part], once=True, **options)
    else:
        reader = IndexedReader([part], num_epochs=1, **options)
    ordered = data.model_copy(update={"shuffle": False})
    shape = StepShape(
        rows,
        1,
        recipe.row_tokens,
        tuple(data.length_buckets),
        normalize=recipe.held_out_normalize,
        fields=recipe.fields,
    )
    packer = _open_packer(reader, ordered, 0, limits)
    iterator = StepIterator(packer, shape)
    try:
        yield from iterator
    finally:
        done(packer.counts)
        iterator.close()


def limit_patches(recipe: Recipe) -> int | None:
    """Return the patches of images that a row may have; None for rows of text."""
    return None if recipe.fields.images is None else recipe.fields.images.row_patches


def count_part(part: MixturePart, row_tokens: int, seconds: float) -> tuple[Counts, bool]:
    """Count what the rows of a dataset become, in order, for at most `seconds`; and return whether
    these were all its rows."""
    counts = Counts()
    start = time.monotonic()
    limit = STREAM_ROWS if is_stream(part.rows) else math.inf
    for index, (row, origin) in enumerate(part.numbered_rows()):
        if time.monotonic() - start > seconds or index == limit:
            return counts, False
        add_items(counts, to_trees(part.tokenize(row, origin), row_tokens))
    return counts, True


@dataclass(frozen=True)
class TreeSize:
    """Size of a tree, in place of the tree where only its size matters."""

    num_tokens: int
    flat_tokens: int
    controls: int
    num_patches: int


def measure_lengths(
    part: MixturePart, data: DataConfig, row_tokens: int, row_patches: int | None = None
) -> list[list[TreeSize | RowNote]]:
    """Tokenize every row once and return the sizes of what each became."""
    limits = {"row_tokens": row_tokens, "row_patches": row_patches}
    options = {**limits, "shuffle": False, "num_epochs": 1}
    reader = IndexedReader([part], num_workers=data.num_workers, **options)
    lengths = [
        [item if isinstance(item, RowNote) else _measure(item) for item in items]
        for items in iter(lambda: next(reader, None), None)
    ]
    reader.close()
    return lengths


def _measure(item: Any) -> TreeSize:
    flat = getattr(item, "flat_tokens", item.num_tokens)
    return TreeSize(item.num_tokens, flat, item.controls, getattr(item, "num_patches", 0))


def _open_packer(
    reader: TreeReader,
    data: DataConfig,
    seed: int,
    limits: dict[str, Any],
    units: int | None = None,
) -> WindowPacker | UnitPacker:
    if units is not None:
        return UnitPacker(reader, units=units, packing=data.packing, **limits)
    return WindowPacker(
        reader,
        **limits,
        window=data.packing_window,
        packing=data.packing,
        shuffle=data.shuffle,
        seed=seed,
    )
