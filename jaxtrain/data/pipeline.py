"""From the config's datasets to a Source: the doorway between section data and steps.py."""

from collections.abc import Iterator, Sequence
from typing import Any

from jaxtrain.batch import Batch
from jaxtrain.config.data import DataConfig, DatasetConfig
from jaxtrain.data.formats import make_tokeniser
from jaxtrain.data.pack import Normalise
from jaxtrain.data.readers import Part
from jaxtrain.data.sources import open_rows
from jaxtrain.data.steps import Source, count_part_steps, eval_part_batches, open_parts

__all__ = ["Source", "count_steps", "eval_batches", "open_part", "open_source"]


def open_source(
    data: DataConfig,
    tokenizer: Any,
    *,
    seed: int,
    rows_per_microstep: int,
    microsteps: int,
    process_index: int = 0,
    process_count: int = 1,
    num_epochs: float | None = None,
    normalise: Normalise = "token",
) -> Source:
    """Source of rounds [Batch [A, B, T]] over data.datasets, seeded and exactly resumable.

    Without num_epochs it never ends; with it the last batch is padded with empty rows. Raises
    UserError for data that cannot be read or of which nothing trains.
    """
    return open_parts(
        _open_all(data.datasets, data, tokenizer),
        data,
        seed=seed,
        rows_per_microstep=rows_per_microstep,
        microsteps=microsteps,
        process_index=process_index,
        process_count=process_count,
        num_epochs=num_epochs,
        normalise=normalise,
    )


def count_steps(
    data: DataConfig,
    tokenizer: Any,
    *,
    seed: int,
    rows_per_microstep: int,
    microsteps: int,
    process_index: int = 0,
    process_count: int = 1,
    num_epochs: float = 1.0,
) -> int:
    """Optimizer steps that open_source(num_epochs=...) will give: every row is tokenised once.

    The same on every process (process_index does not matter): the largest share counts.
    """
    del process_index
    return count_part_steps(
        _open_all(data.datasets, data, tokenizer),
        data,
        seed=seed,
        rows_per_microstep=rows_per_microstep,
        microsteps=microsteps,
        num_epochs=num_epochs,
        process_count=process_count,
    )


def eval_batches(
    dataset: DatasetConfig, data: DataConfig, tokenizer: Any, rows: int
) -> Iterator[Batch]:
    """Batches [1, B, T] of every example of a held-out dataset once; the last one is padded."""
    return eval_part_batches(open_part(dataset, data, tokenizer), data, rows=rows)


def open_part(dataset: DatasetConfig, data: DataConfig, tokenizer: Any) -> Part:
    """One dataset, opened, with the function that makes trees of its rows."""
    tokenise = make_tokeniser(dataset, tokenizer, data.sequence_len, data.too_long)
    return Part(dataset.path, open_rows(dataset), tokenise, dataset.weight)


def _open_all(datasets: Sequence[DatasetConfig], data: DataConfig, tokenizer: Any) -> list[Part]:
    return [open_part(dataset, data, tokenizer) for dataset in datasets]
