"""Recipe of methods that train on sequences: documents, conversations, prompts with answers."""

from typing import Any

from rich.console import Console
from typing_extensions import override

from jaxtrain.config.data import FORMATS, DataConfig, DatasetConfig
from jaxtrain.data.chat.tokenize import RowTokenizer
from jaxtrain.data.packing.pack import NLL, Fields, ImagePacker, Normalize
from jaxtrain.data.pipeline import Recipe
from jaxtrain.data.sources.dataset import open_rows
from jaxtrain.data.sources.readers import MixturePart

SHAPING = {"format", "as_chat", "train_on", "roles_to_train", "train_on_eot", "special_tokens"} | {
    *("fields", "roles", "column_formats", "drop_system_message", "split_thinking"),
    "chat_template_kwargs",
}
"""Keys of a dataset that shape the samples of a row; the cache key covers the rows separately."""


class Sequences(Recipe):
    """`pipeline.Recipe` of chat, completion and text data."""

    # Weights of shared tokens are sums over sequences, so they are not divided by the branches.
    normalize: Normalize = "branch"
    held_out_normalize: Normalize = "branch"
    units: int | None = None
    fields: Fields

    def __init__(
        self,
        data: DataConfig,
        tokenizer: Any,
        trees: bool = False,
        images: ImagePacker | None = None,
    ):
        """trees: samples of a conversation that begin alike become trees, which the layers of the
        model must support. images: what makes patches of the rows' images; None: text alone."""
        self.data, self.tokenizer, self.trees = data, tokenizer, trees
        self.fields = Fields(images=images) if images is not None else NLL
        self.row_tokens = data.sequence_len

    @override
    def open(self, dataset: DatasetConfig) -> MixturePart:
        tokenize = RowTokenizer(
            dataset, self.tokenizer, self.data.sequence_len, self.data.too_long, self.trees
        )
        return MixturePart(dataset.shown_path, open_rows(dataset), tokenize, dataset.weight)

    open_held_out = open

    @override
    def settings(self, dataset: DatasetConfig) -> str | None:
        if type(self) is not Sequences or dataset.format not in FORMATS:
            return None  # code outside jaxtrain shapes the samples; it has no digest
        if self.fields.images is not None:
            return None  # so do files beside the rows
        keys = dataset.model_dump_json(include=SHAPING)
        return repr((keys, self.data.sequence_len, self.data.too_long, self.trees))

    @override
    def probe(self, dataset: DatasetConfig) -> Any:
        from jaxtrain.data.preview import probe_samples

        return probe_samples(dataset, self.tokenizer, self.data, self.trees)

    def show(self, dataset: DatasetConfig, num_samples: int, console: Console) -> None:
        from jaxtrain.data.preview import show_samples

        show_samples(self.open(dataset), self.tokenizer, num_samples, console)

    @override
    def show_example(self, probe: Any, console: Console) -> None:
        from jaxtrain.data.preview import show_sample

        show_sample(probe.samples[0], self.tokenizer, console)
