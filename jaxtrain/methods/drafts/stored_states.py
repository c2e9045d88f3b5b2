"""Target states on disk: written by the verb `capture`, prefetched in training.

    capture   rows ─> batches, as held-out data are read ─> target ─> state_writer.py
    train     batch ─> its samples, by their tokens ─> state_store.py ─> streams on the mesh

The folder records its target, layers and datasets. Differences are refused by name, and a sample
that is missing ends the run: states are never used for other tokens.
"""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jaxtrain.batch import Batch
from jaxtrain.config import Config, DatasetConfig
from jaxtrain.data.counts import Progress
from jaxtrain.data.sources.cache import describe_tokenizer
from jaxtrain.data.sources.readers import is_stream
from jaxtrain.distributed.broadcast import broadcast_or_raise
from jaxtrain.distributed.feed import place_of, put, to_host
from jaxtrain.errors import UserError
from jaxtrain.methods.drafts.capture import FrozenTarget
from jaxtrain.methods.drafts.config import DraftTask
from jaxtrain.methods.drafts.state_store import (
    KEY_BYTES,
    StateLayout,
    StateStore,
    UnknownSample,
    list_samples,
)
from jaxtrain.methods.drafts.state_writer import StateWriter, find_differences
from jaxtrain.methods.drafts.target_states import LAST, STATES
from jaxtrain.methods.offline import OfflineData

NAMES = {"captured": STATES, "last": LAST}
"""Array of the store: stream."""
LOOKED_AT = 256
"""Number of evenly spread rows in the digest of a dataset."""
GIB = 2.0**30


class StoredStates:
    """A `prefetch.CaptureStage` that reads states from disk, and the capture that writes them."""

    name = "the disk"

    def __init__(self, config: Config, target: FrozenTarget):
        """target: the model of the states; only `capture` runs it."""
        assert isinstance(config.task, DraftTask) and config.task.target.path is not None
        self.config, self.target = config, target
        self.folder = Path(config.task.target.path)
        self.mesh = target.bundle.mesh
        self.streams = target.streams
        arrays = {name: self.streams[s] for name, s in NAMES.items() if s in self.streams}
        self.widths = {name: dtype.shape[0] for name, dtype in arrays.items()}
        self.store: StateStore | None = None

    def fill(self, batch: Batch) -> Batch:
        """Read the states of a batch."""
        try:
            states = self.open().read(batch, tuple(self.widths), local_rows(batch, self.mesh))
        except UnknownSample:
            raise UserError(
                f"a sample of the data is not among the target states in {self.folder}; its rows or"
                " the keys that shape them changed since. Run `jaxtrain capture` with this config:"
                " it adds what is missing"
            ) from None
        streams = {NAMES[name]: put(values, self.mesh) for name, values in states.items()}
        return batch._replace(streams={**batch.streams, **streams})

    def describe(self, row_tokens: int) -> str:
        """Describe the folder and the size of a row."""
        row = row_tokens * sum(dtype.itemsize for dtype in self.streams.values())
        return f"target states from {self.folder}: {format_size(row)} a row of {row_tokens} tokens"

    def advise(self, busy: float, waiting: float) -> str:
        """Advise a faster disk if reading is slower than training."""
        if busy <= waiting:
            return ""
        return "Reading is slower than training: lay task.target.path on a faster disk"

    def close(self) -> None:
        """Do nothing: no other process is waited for."""

    def open(self) -> StateStore:
        """Return the store, opened once."""
        if self.store is None:
            self.store = StateStore(self.folder)
        return self.store

    def check(self, data: OfflineData) -> str:
        """Return a line about the store. Raises UserError if it is not that of this target and
        data."""
        store = self.open()
        expected = {k: value for k, value in self.identify().items() if k != "widths"}
        if differences := find_differences(store.about, expected):
            raise UserError(
                f"{self.folder} holds states of another target (task.target.path):"
                f" {', '.join(differences)}. Capture this one's into another folder"
            )
        if missing := self.widths.keys() - store.layout.widths.keys():
            raise UserError(
                f"{self.folder} has no array {missing.pop()!r}, which this task needs; capture into"
                " another folder with its config"
            )
        captured = store.about["datasets"]
        for digest, dataset in self.digests(data).items():
            if digest not in captured:
                raise UserError(
                    f"{self.folder} does not hold the states of all samples of {dataset.path!r}:"
                    " its rows or the keys that shape them changed since, or a capture of them was"
                    " interrupted. Run `jaxtrain capture` with this config: it adds what is missing"
                )
        return f"target states of {len(store.places):,} samples, read from {self.folder}"

    def identify(self) -> dict[str, Any]:
        """Return everything that states depend on besides tokens."""
        about = self.target.identify()
        return {**about, "layers": list(self.target.layers), "widths": self.widths}

    def digests(self, data: OfflineData) -> dict[str, DatasetConfig]:
        """Return {digest of its content: dataset} of all datasets that train or are held out."""
        datasets = {}
        config = self.config.data
        for dataset in [*config.datasets, *config.eval_datasets]:
            part = data.recipe.open(dataset)
            if is_stream(part.rows):
                raise UserError(
                    f"data {dataset.path!r} streams, so that its samples are not known in advance;"
                    " set its streaming to false, or task.target.source to another"
                )
            settings = data.recipe.settings(dataset) or dataset.model_dump_json()
            tokenizer = self.target.bundle.tokenizer
            digest = hashlib.sha256()
            for text in (part.name, settings, *describe_tokenizer(tokenizer), len(part.rows)):
                digest.update(repr(text).encode("utf-8", "surrogatepass"))
            for index in np.unique(np.linspace(0, len(part.rows) - 1, LOOKED_AT).astype(int)):
                row = json.dumps(part.rows[int(index)], sort_keys=True, default=repr)
                digest.update(row.encode("utf-8", "surrogatepass"))
            datasets[digest.hexdigest()] = dataset
        return datasets

    def capture(self, data: OfflineData, log: Callable[[str], None]) -> None:
        """Write the missing states of all samples of the run's data, on every process. States from
        an interrupted capture are reused."""
        about = broadcast_or_raise("the target's description", self.identify)
        datasets = self.digests(data)
        layout = StateLayout.choose(self.widths, self.target.bundle.options["dtype"])
        writer: StateWriter | None = None

        def begin() -> np.ndarray:
            nonlocal writer
            writer = StateWriter(self.folder, layout, about)
            return np.frombuffer(b"".join(writer.keys), np.uint8)

        joined = broadcast_or_raise("what was captured before", begin).tobytes()
        captured = {
            joined[offset : offset + KEY_BYTES] for offset in range(0, len(joined), KEY_BYTES)
        }
        try:
            log("counting tokens: tokenizing the data once")
            tokens = self.count(data, datasets, captured)
            self.announce(tokens, len(captured), layout, log)
            self.run(data, datasets, captured, writer, Progress("capturing", sum(tokens), log))
            if writer is not None:
                writer.finish({digest: dataset.path for digest, dataset in datasets.items()})
        finally:
            if writer is not None:
                writer.close()
        log(f"target states of {len(captured):,} samples are in {self.folder}")

    def count(
        self, data: OfflineData, datasets: dict[str, DatasetConfig], captured: set[bytes]
    ) -> list[int]:
        """Return the number of tokens of each sample to be captured."""
        counts: dict[bytes, int] = {}
        for dataset in datasets.values():
            for batch in data.eval_batches(dataset, self.target.bundle):
                for sample in list_samples(batch):
                    if sample.key not in captured:
                        counts[sample.key] = sample.stop - sample.start
        return list(counts.values())

    def announce(
        self, tokens: list[int], num_captured: int, layout: StateLayout, log: Callable[[str], None]
    ) -> None:
        """Log the work ahead. Raises UserError if the disk has no room for it."""
        need = sum(tokens) * layout.token_bytes
        log(
            f"capturing {len(tokens):,} samples ({num_captured:,} are there already):"
            f" {sum(tokens):,}"
            f" tokens x {layout.token_bytes:,} bytes = {format_size(need)} in {self.folder}"
        )
        free = broadcast_or_raise("free space", lambda: shutil.disk_usage(self.folder).free)
        if need > free:
            raise UserError(
                f"{self.folder} has {format_size(free)} left, {format_size(need)} are needed"
                f" ({layout.token_bytes:,} bytes a token); make room, name a folder on another disk"
                ' (task.target.path), or train with task.target.source "step" or "ahead"'
            )

    def run(
        self,
        data: OfflineData,
        datasets: dict[str, DatasetConfig],
        captured: set[bytes],
        writer: StateWriter | None,
        progress: Progress,
    ) -> None:
        """Capture samples that are not in `captured`, which grows; the next batch runs while one is
        written."""
        waiting: list[tuple[Batch, dict[str, Any]]] = []

        def write() -> None:
            batch, states = waiting.pop(0)
            arrays = {name: np.asarray(to_host(states[NAMES[name]])) for name in self.widths}
            for sample in list_samples(batch):
                part = slice(sample.start, sample.stop)
                if sample.key in captured:
                    continue
                captured.add(sample.key)
                if writer is not None:
                    sample_states = {
                        name: values[sample.row][part] for name, values in arrays.items()
                    }
                    writer.add(sample.key, sample_states)
                progress.count()

        for dataset in datasets.values():
            for batch in data.eval_batches(dataset, self.target.bundle):
                if all(sample.key in captured for sample in list_samples(batch)):
                    continue
                waiting.append((batch, self.target(batch)))
                if len(waiting) > 1:
                    write()
        while waiting:
            write()


def local_rows(batch: Batch, mesh: Mesh) -> set[int]:
    """Return the rows of the microsteps of a batch [A, B, T] that devices of this process hold."""
    shape = batch.tokens.shape
    indices = place_of(shape, mesh).addressable_devices_indices_map(shape).values()
    return {row for index in indices if index for row in range(*index[1].indices(shape[1]))}


def format_size(size: int) -> str:
    """Format bytes for people."""
    return f"{size / GIB:,.2f} GiB" if size >= GIB else f"{size / 2**20:,.1f} MiB"
