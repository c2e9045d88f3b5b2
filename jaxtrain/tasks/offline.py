"""Data that lie there before training: what methods that train on datasets have in common."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from rich.console import Console

from jaxtrain.batch import Batch
from jaxtrain.config import Config, DatasetConfig
from jaxtrain.core.assemble import Parts, count_microsteps
from jaxtrain.core.task import Live, Round
from jaxtrain.data.pipeline import Recipe, Source, count_steps, eval_batches, open_source
from jaxtrain.models.trees import require_trees
from jaxtrain.parallel.feed import row_shards


class OfflineData:
    """`core.task.Data` of section data, its rows made into trees by a recipe."""

    def __init__(self, config: Config, recipe: Recipe):
        self.config, self.recipe = config, recipe
        self.row_tokens = recipe.row_tokens
        self.fields = recipe.fields

    def check(self) -> Iterator[str]:
        """See task.Data."""
        for dataset in self._all():
            yield str(self.recipe.probe(dataset))

    def open(self, parts: Parts, say: Callable[[str], None]) -> "OfflineRounds":
        """See task.Data."""
        config = self.config
        shape = {
            "seed": config.run.seed,
            "rows_per_microstep": config.data.micro_batch_size * row_shards(parts.mesh),
            "microsteps": count_microsteps(config, parts.mesh),
        }
        epochs, total_steps = config.run.num_epochs, config.run.max_steps
        if total_steps is None:
            assert epochs is not None, "the config has one of the two"
            say("counting steps: tokenising and packing the data once")
            total_steps = count_steps(config.data, self.recipe, **shape, num_epochs=epochs)
            say(f"{total_steps} steps in {epochs:g} epochs")
        source = open_source(config.data, self.recipe, **shape, num_epochs=epochs)
        return OfflineRounds(source, total_steps)

    def eval_batches(self, dataset: DatasetConfig, parts: Parts) -> Iterator[Batch]:
        """See task.Data."""
        rows = self.config.data.micro_batch_size * row_shards(parts.mesh)
        return eval_batches(dataset, self.config.data, self.recipe, rows)

    def show(self, console: Console, num_samples: int) -> None:
        """See task.Data."""
        for dataset in self._all():
            console.print(str(self.recipe.probe(dataset)), style="bold", markup=False)
            self.recipe.show(dataset, num_samples, console)
        self.show_packing(console)

    def describe(self, console: Console) -> None:
        """See task.Data."""
        probes = [self.recipe.probe(dataset) for dataset in self._all()]
        for found in probes:
            console.print(str(found), markup=False)
        self.show_packing(console, num_batches=4)
        self.recipe.show_example(probes[0], console)

    def show_packing(self, console: Console, num_batches: int = 20) -> None:
        """How full the first batches' rows are."""
        data = self.config.data
        source = open_source(
            data,
            self.recipe,
            seed=self.config.run.seed,
            rows_per_microstep=data.micro_batch_size,
            microsteps=1,
            num_epochs=1.0 if self.config.run.num_epochs else None,
        )
        # One at a time: a batch may take a good part of the memory.
        documents = [
            count_roots(round_[0]) for _, round_ in zip(range(num_batches), source, strict=False)
        ]
        counters = source.counters()
        source.close()
        console.print(
            f"packing of the first {len(documents)} batches: {data.micro_batch_size} rows of"
            f" {self.row_tokens} tokens, {counters['packing_efficiency']:.1%} filled,"
            f" {np.mean(documents):.1f} samples a batch"
        )

    def _all(self) -> list[DatasetConfig]:
        return [*self.config.data.datasets, *self.config.data.eval_datasets]


class OfflineRounds:
    """`core.task.Rounds` of a data source: a round is one batch."""

    engine: Any = None
    serves = pauses = False

    def __init__(self, source: Source, total_steps: int):
        self.source, self.total_steps = source, total_steps
        self.state, self.restore = source.state, source.restore
        self.counters, self.close = source.counters, source.close

    def ready(self, live: Live) -> None:
        """Nothing waits for weights."""

    def next(self, live: Live) -> Round:
        """The next batch; StopIteration where epochs end."""
        with live.phase("waiting for data"):
            batches = next(self.source)
        return live.prepare(Round(batches))

    def finish(self, live: Live, *, interrupted: bool) -> dict[str, float]:
        """Nothing waits for weights."""
        return {}


def count_roots(batch: Batch) -> int:
    """Trees in a host batch: roots that are not padding."""
    index = np.arange(batch.prev.shape[-1])
    return int(((batch.prev < 0) & (batch.until > index + 1)).sum())


def check_packing(config: Config, architecture: Any) -> None:
    """Refuse rows of several documents for a model whose layers would run from one to the next."""
    if config.data.packing:
        found = "data.packing puts several documents into a row"
        require_trees(architecture, found, "set data.packing to false")
