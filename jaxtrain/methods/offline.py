"""Data and rounds of methods that train on existing datasets."""

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from jaxtrain.batch import Batch
from jaxtrain.config import Config, DatasetConfig, ModelConfig
from jaxtrain.core.architecture import find_architecture
from jaxtrain.core.bundle import ModelBundle, count_microsteps
from jaxtrain.core.task import Round, TrainingContext
from jaxtrain.data.counts import describe_controls, describe_counts, describe_unread, unread_of
from jaxtrain.data.packing.pack import ImagePacker
from jaxtrain.data.packing.steps import BatchSource
from jaxtrain.data.pipeline import Recipe, count_part, eval_batches, open_source, plan_steps
from jaxtrain.data.sources.readers import MixturePart
from jaxtrain.distributed.feed import row_shards
from jaxtrain.distributed.mesh import is_main_process
from jaxtrain.errors import UserError
from jaxtrain.models.capabilities import require_trees

LOOK_SECONDS = 10.0
"""Seconds for which a dry run tokenizes each dataset."""
LOOK_WINDOW = 1024
"""Packing window, in samples, if only a few batches are shown."""


class OfflineData:
    """`core.task.Data` of section data, its rows made into trees by a recipe."""

    def __init__(self, config: Config, recipe: Recipe, note: str = ""):
        """note: a remark about the data that `check` and `describe` print."""
        self.config, self.recipe, self.note = config, recipe, note
        self.log: Callable[[str], None] = print if is_main_process() else _discard_log
        self._reported_datasets: set[str] = set()
        self._reported_unread: set[str] = set()
        self.row_tokens = recipe.row_tokens
        self.fields = recipe.fields

    def check(self) -> Iterator[str]:
        """Probe every dataset and yield a line about each; UserError if it would not train."""
        for dataset in self._all():
            probe = self.recipe.probe(dataset)
            yield str(probe)
            # With epochs all rows are counted before the first step.
            if self.config.run.max_steps is not None and getattr(probe, "unread", ""):
                yield f"  first look: {probe.unread}"
        if self.note:
            yield self.note

    def open(self, bundle: ModelBundle, log: Callable[[str], None]) -> "OfflineRounds":
        """Open the datasets for training with the trained model's bundle."""
        config = self.config
        shape = {
            "seed": config.run.seed,
            "rows_per_microstep": config.data.micro_batch_size * row_shards(bundle.mesh),
            "microsteps": count_microsteps(config, bundle.mesh),
        }
        epochs, total_steps = config.run.epochs, config.run.max_steps
        from jaxtrain.data.media_tokens import only_text

        self.log, media, counted = log, bundle.architecture.media_tokens, total_steps is None
        open_part = self._open_cached if counted else self._open
        opened = [only_text(open_part(dataset, bundle), media) for dataset in config.data.datasets]
        if total_steps is None:
            assert epochs is not None, "the config has one of the two"
            log("counting steps: tokenizing and packing the data once")
            total_steps, counts = plan_steps(
                config.data, self.recipe, **shape, num_epochs=epochs, opened=opened
            )
            log(f"{total_steps} steps in {epochs:g} epochs")
            self.log_counts(counts, f"data of {epochs:g} epochs")
        source = open_source(config.data, self.recipe, **shape, num_epochs=epochs, opened=opened)
        return OfflineRounds(source, total_steps, None if counted else self.log_counts)

    def _open(self, dataset: DatasetConfig, bundle: ModelBundle) -> MixturePart:
        return self.recipe.open(dataset)

    def _open_cached(self, dataset: DatasetConfig, bundle: ModelBundle) -> MixturePart:
        """Open the dataset, tokenized from the disk cache if data.cache is set."""
        data, part = self.config.data, self.recipe.open(dataset)
        if not data.cache:
            return part
        from jaxtrain.data.sources.cache import cache_part, default_folder

        return cache_part(
            part,
            self.recipe.settings(dataset),
            bundle.tokenizer,
            Path(data.cache_dir) if data.cache_dir else default_folder(),
            row_tokens=self.row_tokens,
            num_workers=data.num_workers,
            log=self.log,
        )

    def log_counts(self, counts: Mapping[str, int], label: str) -> None:
        """Log how much of the data was dropped and why, and what prefix sharing saves."""
        data = self.config.data
        controls = describe_controls(data.datasets)
        unread = describe_unread(counts, self._reported_unread)
        self._reported_unread |= unread_of(counts).keys()
        line = describe_counts(counts, data.sequence_len, controls)
        if line or unread:
            self.log(f"{label}: {'; '.join(filter(None, (line, unread)))}")

    def eval_batches(self, dataset: DatasetConfig, bundle: ModelBundle) -> Iterator[Batch]:
        """Yield batches [1, B, T] of a held-out dataset."""
        rows = self.config.data.micro_batch_size * row_shards(bundle.mesh)

        def done(counts: Mapping[str, int]) -> None:
            key = f"{dataset.shown_path} {dataset.split}"
            if key not in self._reported_datasets:
                self._reported_datasets.add(key)
                self.log_counts(counts, f"held-out {dataset.shown_path}")

        from jaxtrain.data.media_tokens import only_text

        part = only_text(self.recipe.open_held_out(dataset), bundle.architecture.media_tokens)
        return eval_batches(dataset, self.config.data, self.recipe, rows, done, part)

    def show(self, console: Console, num_samples: int) -> None:
        """Print the samples that the rows become."""
        for dataset in self._all():
            console.print(str(self.recipe.probe(dataset)), style="bold", markup=False)
            self.recipe.show(dataset, num_samples, console)
        self.show_packing(console)

    def describe(self, console: Console) -> None:
        """Print a line about each dataset, how rows fill up, and an example."""
        probes = [self.recipe.probe(dataset) for dataset in self._all()]
        for probe in probes:
            console.print(str(probe), markup=False)
        if self.note:
            console.print(self.note, markup=False)
        self.show_counts(console)
        self.show_packing(console, num_batches=4)
        self.recipe.show_example(probes[0], console)

    def show_counts(self, console: Console) -> None:
        """Print how many rows were kept and dropped, of those that are tokenized in
        LOOK_SECONDS."""
        controls = describe_controls(self.config.data.datasets)
        for dataset in self._all():
            counts, complete = count_part(self.recipe.open(dataset), self.row_tokens, LOOK_SECONDS)
            rows = f"{'all' if complete else 'the first'} {counts['rows']:,} rows"
            line = describe_counts(counts, self.config.data.sequence_len, controls)
            line = line or f"{counts['trees']:,} examples, none dropped"
            line = "; ".join(filter(None, (line, describe_unread(counts))))
            side = " (held out)" if dataset.part == "held_out" else ""
            console.print(
                f"{dataset.shown_path}{side}, {rows}: {line}", markup=False, soft_wrap=True
            )

    def show_packing(self, console: Console, num_batches: int = 20) -> None:
        """Print how full the rows of the first batches are."""
        data = self.config.data
        # A packing window is filled before it yields its first row, so a wide one would be slow.
        data = data.model_copy(update={"packing_window": min(data.packing_window, LOOK_WINDOW)})
        source = open_source(
            data,
            self.recipe,
            seed=self.config.run.seed,
            rows_per_microstep=data.micro_batch_size,
            microsteps=1,
            num_epochs=1.0 if self.config.run.epochs else None,
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
        if counters.get("images"):
            images, rate = counters["images"], counters["patches"] / counters["patch_slots"]
            console.print(
                f"images: {images:,} embedded, {counters['images_shared']:,} more share one of"
                f" them; {counters['image_tokens'] / images:.1f} tokens and"
                f" {counters['patches'] / images:.1f} patches each; their part of rows is"
                f" {rate:.1%} filled",
                soft_wrap=True,
            )

    def _all(self) -> list[DatasetConfig]:
        return [*self.config.data.datasets, *self.config.data.eval_datasets]


class OfflineRounds:
    """`core.task.Rounds` of a data source: a round is one batch."""

    engine: Any = None
    serves = pauses = False

    def __init__(
        self,
        source: BatchSource,
        total_steps: int,
        report: Callable[[Mapping[str, int], str], None] | None = None,
    ):
        """report: receives the counts of the data read, after the first batch and with the last."""
        self.source, self.total_steps = source, total_steps
        self.report, self._num_reported = report, 0

    def ready(self, context: TrainingContext) -> None:
        """Do nothing: no engine needs weights."""

    def next(self, context: TrainingContext) -> Round:
        """Return the next batch as a round; raises StopIteration after the last epoch."""
        start = time.monotonic()
        batches = self.draw(context)
        waited = {"data_seconds": time.monotonic() - start}
        last = context.step + 1 >= self.total_steps
        if self.report is not None and (last or not self._num_reported):
            counts = self.counters()["counts"]
            if counts["draws"] > self._num_reported:
                self.report(counts, "data read so far")
            self._num_reported = counts["draws"]
        return context.prepare(Round(batches, waited, version=context.step))

    def draw(self, context: TrainingContext) -> list[Batch]:
        """Return the source's next batches."""
        with context.phase("waiting for data"):
            return next(self.source)

    def finish(self, context: TrainingContext, *, interrupted: bool) -> dict[str, float]:
        """Return no numbers: no engine needs weights."""
        return {}

    def state(self) -> dict[str, Any]:
        """Return the source's cursor."""
        return self.source.state()

    def restore(self, state: dict[str, Any]) -> None:
        """Continue exactly after the cursor `state`."""
        self.source.restore(state)

    def counters(self) -> dict[str, Any]:
        """Return the source's counters."""
        return self.source.counters()

    def close(self) -> None:
        """Stop the source's thread and workers."""
        self.source.close()


def _discard_log(text: str) -> None:
    """Discard log lines, on processes other than 0."""


def count_roots(batch: Batch) -> int:
    """Count the trees in a host batch: roots that are not padding."""
    index = np.arange(batch.prev.shape[-1])
    return int(((batch.prev < 0) & (batch.until > index + 1)).sum())


def check_packing(config: Config, architecture: Any) -> None:
    """Refuse packed rows for a model whose layers would carry state across documents."""
    if config.data.packing:
        conflict = "data.packing puts several documents into a row"
        require_trees(architecture, conflict, "set data.packing to false")


def open_images(config: Config, tokenizer: Any, row_tokens: int) -> ImagePacker | None:
    """Have the rows' images read, if the model has a tower for them; None: images are refused."""
    if config.model.architecture is None and config.model.path is None:
        return None
    folder, raw = find_architecture(config.model)
    if raw.get("vision_config") is None:
        return None
    from jaxtrain.data.images.setup import open_packer

    return open_packer(folder, raw, tokenizer, config.data, row_tokens)


def reads_same_images(model: ModelConfig, tokenizer: Any) -> bool:
    """Return True if another model reads images, and takes the same patches and tokens of a picture
    as the one whose format the tokenizer has (`open_images`)."""
    from jaxtrain.data.images.format import read_format

    folder, raw = find_architecture(model)
    if getattr(tokenizer, "image_format", None) is None or raw.get("vision_config") is None:
        return False
    try:
        return read_format(folder, raw, tokenizer) == tokenizer.image_format
    except UserError:  # settings that are not followed
        return False
