"""Rows of data as sequences: documents, conversations, prompts with answers.

A `Recipe` says what a method makes of rows; this one is for methods that train lone sequences.
"""

from typing import Any

from rich.console import Console

from jaxtrain.config.data import FORMATS, DataConfig, DatasetConfig
from jaxtrain.data.chat.tokenize import RowTokenizer
from jaxtrain.data.packing.pack import NLL, Fields, Normalize
from jaxtrain.data.preview import Probe, probe_samples, show_sample, show_samples
from jaxtrain.data.sources.dataset import open_rows
from jaxtrain.data.sources.readers import MixturePart

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
        tokenize = RowTokenizer(
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
        return probe_samples(dataset, self.tokenizer, self.data, self.trees)

    def show(self, dataset: DatasetConfig, num_samples: int, console: Console) -> None:
        show_samples(self.open(dataset), self.tokenizer, num_samples, console)

    def show_example(self, found: Probe, console: Console) -> None:
        """See pipeline.Recipe."""
        show_sample(found.samples[0], self.tokenizer, console)
