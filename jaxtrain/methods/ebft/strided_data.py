"""Rows for training by blocks inside of documents: SFT's sequences, of which some have no room."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from typing_extensions import override

from jaxtrain.config.data import DataConfig, DatasetConfig
from jaxtrain.data.packing.pack import Fields
from jaxtrain.data.packing.tree import Node, Tree
from jaxtrain.data.preview import Probe
from jaxtrain.data.sample import Dropped, Sample
from jaxtrain.data.sequences import Sequences
from jaxtrain.data.sources.readers import STREAM_ROWS, MixturePart
from jaxtrain.errors import UserError
from jaxtrain.methods.ebft.blocks import CE, RL, BlockStrides

THOUGHTS = ("<think>", "</think>")
NO_ROOM = "no room for a block"


class BlockSequences(Sequences):
    """`pipeline.Recipe` of chat, completion and text data, each sequence a document of its own."""

    def __init__(
        self,
        data: DataConfig,
        tokenizer: Any,
        strides: BlockStrides,
        *,
        keep_short: bool,
        mask_thinking: bool,
        dtype: Any = np.float32,
    ):
        """keep_short: whether documents without a block train all the same, by their likelihood.
        mask_thinking: no likelihood of what stands between the tags of thoughts."""
        super().__init__(data, tokenizer)
        self.strides, self.keep_short = strides, keep_short
        self.tags: tuple[tuple[int, ...], ...] | None = None
        if mask_thinking:
            self.tags = tuple(
                tuple(tokenizer.encode(tag, add_special_tokens=False)) for tag in THOUGHTS
            )
        self.fields = Fields((CE, RL), dtype=dtype)

    @override
    def open(self, dataset: DatasetConfig) -> MixturePart:
        part = super().open(dataset)
        tokenize = PaddedTokenizer(part.tokenize, self.strides, self.keep_short, self.tags)
        return MixturePart(part.name, part.rows, tokenize, part.weight)

    open_held_out = open

    def probe(self, dataset: DatasetConfig) -> Probe:
        """Check a dataset; raises UserError if no row has room for a block."""
        probe = super().probe(dataset)
        samples = [sample for sample in probe.samples if isinstance(sample, Sample)]
        if any(len(self.strides.find(sample.weights)) for sample in samples):
            return probe
        part, longest = super().open(dataset), 0
        rows, name = iter(part.rows), "no row"
        if not hasattr(part.rows, "__len__"):
            rows = itertools.islice(rows, STREAM_ROWS)
            name = f"none of the first {STREAM_ROWS} rows"
        for index, row in enumerate(rows):
            for item in part.tokenize(row, f"{dataset.path} row {index}"):
                if isinstance(item, Sample):
                    if len(self.strides.find(item.weights)):
                        return probe
                    longest = max(longest, len(item.tokens))
        strides = self.strides
        raise UserError(
            f"{dataset.path}: {name} has room for a block; the longest has {longest} tokens. A"
            f" block needs task.generate_max_len {strides.length} tokens of an answer behind"
            f" task.context_length {strides.context} tokens and task.min_completion_prefix"
            f" {strides.prefix} of the answer; lower these, or choose longer rows"
        )


class PaddedTokenizer:
    """(row, origin) -> another row_tokenizer's documents, with weights of both losses."""

    def __init__(
        self,
        tokenize: Any,
        strides: BlockStrides,
        keep_short: bool,
        tags: tuple[tuple[int, ...], ...] | None,
    ):
        self.tokenize, self.strides = tokenize, strides
        self.keep_short, self.tags = keep_short, tags

    def __call__(self, row: Any, origin: str) -> Sequence[Any]:
        """Return the row's documents and drops, as readers.Tokenize."""
        return [self.judge(item) for item in self.tokenize(row, origin)]

    def judge(self, item: Any) -> Any:
        """Return the document with both weights, or the reason why it is dropped."""
        if not isinstance(item, Sample) or not np.any(item.weights[1:]):
            return item  # a drop, or what will be dropped under a reason of its own
        likely = item.weights
        if self.tags is not None:
            likely = np.where(between(item.tokens, *self.tags), 0.0, likely).astype(likely.dtype)
        if not len(self.strides.find(item.weights)) and not (
            self.keep_short and np.any(likely[1:])
        ):
            return Dropped(NO_ROOM, item.origin)
        node = Node(-1, np.asarray(item.tokens, np.int32), {CE: likely, RL: item.weights})
        return Tree((node,), origin=item.origin, controls=item.controls)


def between(tokens: np.ndarray, opened: Sequence[int], closed: Sequence[int]) -> np.ndarray:
    """Return the tokens of the tags and between them, bool [n]; a tag that is not closed reaches to
    the end."""
    marks = sorted(
        [(index, 1) for index in find_all(tokens, opened)]
        + [(index + len(closed), -1) for index in find_all(tokens, closed)]
    )
    inside = np.zeros(len(tokens), bool)
    start = None
    for index, kind in marks:
        if kind == 1 and start is None:
            start = index
        elif kind == -1 and start is not None:
            inside[start:index] = True
            start = None
    if start is not None:
        inside[start:] = True
    return inside


def find_all(tokens: np.ndarray, pattern: Sequence[int]) -> list[int]:
    """Return the positions where a sequence of ids begins."""
    size = len(pattern)
    if not size or size > len(tokens):
        return []
    windows = np.lib.stride_tricks.sliding_window_view(tokens, size)
    return np.flatnonzero((windows == np.asarray(pattern)).all(1)).tolist()
