"""From the config's datasets to a Source: the doorway between section data and steps.py."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from rich.console import Console

from jaxtrain.batch import Batch
from jaxtrain.config.data import DataConfig, DatasetConfig
from jaxtrain.data.counts import Counts
from jaxtrain.data.packing.pack import Fields, Normalize
from jaxtrain.data.packing.steps import BatchSource, eval_part_batches, open_parts, plan_part_steps
from jaxtrain.data.sources.readers import MixturePart

__all__ = ["Recipe", "BatchSource", "count_steps", "eval_batches", "open_source", "plan_steps"]


class Recipe(Protocol):
    """What a method makes of the rows of a dataset, and how that fills the rows of a step."""

    row_tokens: int
    """T."""
    normalize: Normalize
    """What the weights of a tree are divided by: see pack.lay_out."""
    held_out_normalize: Normalize
    """The same for held-out data."""
    units: int | None
    """Trees of an optimizer step, which replaces a fixed number of microsteps."""
    fields: Fields
    """Weights and other per-token arrays of every batch."""

    def open(self, dataset: DatasetConfig) -> MixturePart:
        """The dataset, opened, with the function that makes samples or trees of its rows."""
        ...

    def open_held_out(self, dataset: DatasetConfig) -> MixturePart:
        """The same for a held-out dataset."""
        ...

    def settings(self, dataset: DatasetConfig) -> str | None:
        """All keys that shape what rows of the dataset become, for the cache; None: not cached."""
        ...

    def probe(self, dataset: DatasetConfig) -> Any:
        """A first look at a few rows; UserError when they would not train. str() is a line."""
        ...

    def show(self, dataset: DatasetConfig, num_samples: int, console: Console) -> None:
        """The verb preprocess: counts of all rows, what was dropped and why, some samples."""
        ...

    def show_example(self, found: Any, console: Console) -> None:
        """Print the first example that `probe` found."""
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
    """Source of rounds [Batch [A, B, T]] over data.datasets, seeded and exactly resumable.

    Without num_epochs it never ends; with it the last batch is padded with empty rows. Raises
    UserError for data that cannot be read or of which nothing trains.
    """
    return open_parts(
        opened or [recipe.open(dataset) for dataset in data.datasets],
        data,
        seed=seed,
        rows_per_microstep=rows_per_microstep,
        microsteps=microsteps,
        num_epochs=num_epochs,
        normalize=recipe.normalize,
        row_tokens=recipe.row_tokens,
        units=recipe.units,
        fields=recipe.fields,
    )


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
    """Optimizer steps that open_source(num_epochs=...) will give, and the counts of what was read:
    every row is tokenized once."""
    return plan_part_steps(
        opened or [recipe.open(dataset) for dataset in data.datasets],
        data,
        seed=seed,
        rows_per_microstep=rows_per_microstep,
        microsteps=microsteps,
        num_epochs=num_epochs,
        row_tokens=recipe.row_tokens,
        units=recipe.units,
    )


def count_steps(data: DataConfig, recipe: Recipe, **shape: Any) -> int:
    """The steps of plan_steps alone."""
    return plan_steps(data, recipe, **shape)[0]


def eval_batches(
    dataset: DatasetConfig,
    data: DataConfig,
    recipe: Recipe,
    rows: int,
    done: Callable[[Counts], None] = lambda counts: None,
    opened: MixturePart | None = None,
) -> Iterator[Batch]:
    """Batches [1, B, T] of every example of a held-out dataset once; the last one is padded.

    done: gets the counts of what was read. opened: the dataset, where it was opened already.
    """
    return eval_part_batches(
        opened or recipe.open_held_out(dataset),
        data,
        rows=rows,
        row_tokens=recipe.row_tokens,
        fields=recipe.fields,
        normalize=recipe.held_out_normalize,
        done=done,
    )
