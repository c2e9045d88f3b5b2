"""Rows of data as sequences: documents, conversations, prompts with answers.

A `Recipe` says what a method makes of rows; this one is for methods that train lone sequences.
"""

import time
from typing import Any

from rich.console import Console

from jaxtrain.config.data import FORMATS, DataConfig, DatasetConfig
from jaxtrain.data.formats import Probe, make_row_tokenizer, probe
from jaxtrain.data.packing.pack import NLL, Fields, Normalize
from jaxtrain.data.packing.tree import Tree
from jaxtrain.data.preview import Counts, show_counts, show_sample
from jaxtrain.data.progress import Progress
from jaxtrain.data.sample import Sample
from jaxtrain.data.sources.dataset import open_rows
from jaxtrain.data.sources.readers import STREAM_ROWS, MixturePart
from jaxtrain.errors import UserError

SHAPING = {"format", "fields", "roles", "as_chat", "train_on", "special_tokens"}
"""Keys of a dataset that shape what a row becomes; which rows there are the rows themselves say."""


class Sequences:
    """`pipeline.Recipe` of chat, completion and text data."""

    # Weights of shared tokens are those of the sequences, added up: not divided by the branches.
    normalize: Normalize = "branch"
    held_out_normalize: Normalize = "branch"
    units: int | None = None
    fields: Fields = NLL

    def __init__(self, data: DataConfig, tokenizer: Any, trees: bool = False):
        """trees: the samples of a conversation that begin alike become trees; the model's layers
        must follow them."""
        self.data, self.tokenizer, self.trees = data, tokenizer, trees
        self.row_tokens = data.sequence_len

    def open(self, dataset: DatasetConfig) -> MixturePart:
        """See pipeline.Recipe."""
        tokenize = make_row_tokenizer(
            dataset, self.tokenizer, self.data.sequence_len, self.data.too_long, self.trees
        )
        return MixturePart(dataset.path, open_rows(dataset), tokenize, dataset.weight)

    open_held_out = open

    def settings(self, dataset: DatasetConfig) -> str | None:
        """See pipeline.Recipe."""
        if type(self) is not Sequences or dataset.format not in FORMATS:
            return None  # the code of somebody else shapes what rows become
        keys = dataset.model_dump_json(include=SHAPING)
        return repr((keys, self.data.sequence_len, self.data.too_long, self.trees))

    def probe(self, dataset: DatasetConfig) -> Probe:
        """See pipeline.Recipe."""
        return probe(dataset, self.tokenizer, self.data, self.trees)

    def show(self, dataset: DatasetConfig, num_samples: int, console: Console) -> None:
        """Tokenize the dataset; print its first samples and its counts."""
        part, counts, shown = self.open(dataset), Counts(), 0
        began, num_rows = time.monotonic(), 0
        total = None if dataset.streaming else len(part.rows)
        log = lambda text: console.print(text, markup=False)  # noqa: E731
        progress = Progress(f"tokenizing {dataset.path}", total, log)
        for index, row in enumerate(progress.each(part.rows)):
            if dataset.streaming and index == STREAM_ROWS:
                console.print(f"(the first {STREAM_ROWS} rows of a stream)")
                break
            results = part.tokenize(row, f"{dataset.path} row {index}")
            num_rows += 1
            counts.add(results)
            for result in results:
                if isinstance(result, Sample | Tree) and shown < num_samples:
                    show_sample(result, self.tokenizer, console)
                    shown += 1
        speed = num_rows / max(time.monotonic() - began, 1e-9)
        show_counts(counts, f"{dataset.path} ({speed:,.0f} rows/s)", console)
        if not counts.lengths:
            raise UserError(
                f"{dataset.path}: not a single sample is left to train on (counts above)"
            )

    def show_example(self, found: Probe, console: Console) -> None:
        """See pipeline.Recipe."""
        show_sample(found.samples[0], self.tokenizer, console)
