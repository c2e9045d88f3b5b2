"""Rows for drafts: SFT's sequences, without those that leave a draft nothing to guess."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from typing_extensions import override

from jaxtrain.config.data import DataConfig, DatasetConfig
from jaxtrain.data.packing.tree import Tree
from jaxtrain.data.sample import Dropped, Sample
from jaxtrain.data.sequences import Sequences
from jaxtrain.data.sources.readers import MixturePart


class DraftSequences(Sequences):
    """A `pipeline.Recipe` of chat, completion and text data that drops and counts samples with too
    few trained tokens, or with no two of them in a row."""

    def __init__(self, data: DataConfig, tokenizer: Any, least: int, trees: bool = False):
        """least: trained tokens that a sample must have."""
        super().__init__(data, tokenizer, trees)
        self.least = least

    @override
    def open(self, dataset: DatasetConfig) -> MixturePart:
        part = super().open(dataset)
        return MixturePart(
            part.name, part.rows, MinLengthTokenizer(part.tokenize, self.least), part.weight
        )

    open_held_out = open

    @override
    def settings(self, dataset: DatasetConfig) -> str | None:
        shaping = Sequences(self.data, self.tokenizer, self.trees).settings(dataset)
        return None if shaping is None else repr((shaping, "draft", self.least))


class MinLengthTokenizer:
    """A row tokenizer that replaces short samples by the reason for dropping them."""

    def __init__(self, tokenize: Any, least: int):
        self.tokenize, self.least = tokenize, least

    def __call__(self, row: Any, origin: str) -> Sequence[Any]:
        """Tokenize a row."""
        return [self.judge(item) for item in self.tokenize(row, origin)]

    def judge(self, item: Any) -> Any:
        """Return the item, or the reason to drop it."""
        if isinstance(item, Sample):
            runs = [item.weights[1:]]  # nothing predicts the first
        elif isinstance(item, Tree):
            runs = [node.weights["nll"][node.parent < 0 :] for node in item.nodes]
        else:
            return item
        trained = sum(int(np.count_nonzero(run)) for run in runs)
        if trained == 0:
            return item  # has a reason of its own
        if trained < self.least:
            return Dropped(f"fewer than task.min_loss_tokens {self.least} trained", item.origin)
        if not any(np.any((run[:-1] > 0) & (run[1:] > 0)) for run in runs):
            return Dropped("no two trained tokens in a row", item.origin)
        return item
