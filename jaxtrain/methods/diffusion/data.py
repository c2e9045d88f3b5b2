"""Documents for bidirectional models: no document shows an answer the messages after it.

    conversation   user A1 user A2          two trained stretches
    documents      user A1 end end          each ends with its own, and some more of its end token
                   user A1 user A2 end

A bidirectional model could infer A1 from the user's next message, which does not exist yet at
inference when the model writes A1.
"""

import dataclasses
import zlib
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from typing_extensions import override

from jaxtrain.config.data import DataConfig, DatasetConfig
from jaxtrain.data.packing.pack import Fields
from jaxtrain.data.preview import Probe
from jaxtrain.data.sample import Sample
from jaxtrain.data.sequences import Sequences
from jaxtrain.data.sources.readers import MixturePart

BOTH_SIDES = Fields(since=True)
"""Fields of batches in which tokens see later ones."""


class SingleAnswers(Sequences):
    """`pipeline.Recipe` of chat, completion and text data with a document per trained span."""

    fields: Fields = BOTH_SIDES

    def __init__(
        self, data: DataConfig, tokenizer: Any, ends: Collection[int], padding: int, split: bool
    ):
        """ends: tokens that end an answer; up to `padding` copies are appended to one. split: False
        keeps documents with several trained spans whole."""
        super().__init__(data, tokenizer, trees=False)
        self.ends, self.padding, self.split = frozenset(ends), padding, split

    @override
    def open(self, dataset: DatasetConfig) -> MixturePart:
        part = super().open(dataset)
        return MixturePart(part.name, part.rows, self._cut(part.tokenize), part.weight)

    open_held_out = open

    @override
    def settings(self, dataset: DatasetConfig) -> str | None:
        shaping = Sequences(self.data, self.tokenizer).settings(dataset)
        options = ("single answers", sorted(self.ends), self.padding, self.split)
        return None if shaping is None else repr((shaping, *options))

    @override
    def probe(self, dataset: DatasetConfig) -> Probe:
        base_probe, cut = super().probe(dataset), self._cut(None)
        samples = tuple(document for item in base_probe.samples for document in cut.split_up(item))
        return dataclasses.replace(base_probe, samples=samples)

    def _cut(self, tokenize: Any) -> "TruncatedAnswers":
        return TruncatedAnswers(
            tokenize, self.ends, self.padding, self.data.sequence_len, self.split
        )


@dataclasses.dataclass(frozen=True)
class TruncatedAnswers:
    """Callable (row, origin) -> output of another row tokenizer, with samples cut and padded."""

    tokenize: Any
    ends: frozenset[int]
    padding: int
    sequence_len: int
    split: bool

    def __call__(self, row: Any, origin: str) -> Sequence[Any]:
        return [document for item in self.tokenize(row, origin) for document in self.split_up(item)]

    def split_up(self, item: Any) -> list[Any]:
        """Split a sample into documents; return other items unchanged."""
        if not isinstance(item, Sample):
            return [item]
        trained = np.flatnonzero(item.weights)
        stops = trained[np.append(np.diff(trained) > 1, True)] + 1
        starts = trained[np.append(True, np.diff(trained) > 1)]
        if not self.split:
            starts, stops = starts[:1], np.array([len(item.tokens)])
        documents = []
        for number, (start, stop) in enumerate(zip(starts, stops, strict=True)):
            weights = item.weights[:stop].copy()
            weights[:start] = 0.0
            document = dataclasses.replace(item, tokens=item.tokens[:stop], weights=weights)
            documents.append(
                dataclasses.replace(self.pad(document), controls=item.controls * (not number))
            )
        return documents

    def pad(self, sample: Sample) -> Sample:
        """Append copies of the end token; their number is a hash of the document, so that it is
        equal in every epoch and process."""
        tokens, weights = sample.tokens, sample.weights
        room = min(self.padding, self.sequence_len - len(tokens))
        if room <= 0 or int(tokens[-1]) not in self.ends or not weights[-1]:
            return sample
        seed = zlib.crc32(tokens.astype(np.int32).tobytes())
        num_padding = int(np.random.default_rng(seed).integers(0, room + 1))
        return dataclasses.replace(
            sample,
            tokens=np.append(tokens, np.full(num_padding, tokens[-1], tokens.dtype)),
            weights=np.append(weights, np.full(num_padding, weights[-1], weights.dtype)),
        )
