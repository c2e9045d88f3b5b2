"""Tokens that represent images and videos: training on text alone refuses rows that contain one."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxtrain.data.packing.tree import Forest, Node, Tree, TreeGroup
from jaxtrain.data.sample import Sample
from jaxtrain.data.sources.readers import MixturePart, Tokenize
from jaxtrain.errors import UserError

MediaTokens = Mapping[int, str]
"""{token id: its key in config.json}."""


def find_media(tokens: Any, media: MediaTokens) -> str:
    """Describe the first token that represents an image or a video; "" if there is none."""
    positions = np.isin(tokens, [*media]).nonzero()[0]
    if not len(positions):
        return ""
    token = int(np.asarray(tokens)[positions[0]])
    return f"token {token} ({media[token]}) stands for an image or a video, and only text is read"


@dataclasses.dataclass(frozen=True)
class TextOnly:
    """`readers.Tokenize` that raises UserError for a row with a media token."""

    tokenize: Tokenize
    media: MediaTokens

    def __call__(self, row: Any, origin: str) -> Sequence[Any]:
        items = self.tokenize(row, origin)
        for tokens in list_tokens(items):
            if problem := find_media(tokens, self.media):
                raise UserError(f"{origin}: {problem}; leave the row out")
        return items


def only_text(part: MixturePart, media: MediaTokens) -> MixturePart:
    """Return the dataset with rows refused that contain media tokens."""
    if not media:
        return part
    return dataclasses.replace(part, tokenize=TextOnly(part.tokenize, media))


def list_tokens(items: Sequence[Any]) -> Iterator[np.ndarray]:
    """Yield the token arrays of samples and trees, without the tokens that stand for their
    images."""
    for item in items:
        match item:
            case Sample():
                yield _text_of(item)
            case Tree():
                yield from map(_text_of, item.nodes)
            case Forest() | TreeGroup():
                yield from list_tokens(item.trees)


def _text_of(run: Sample | Node) -> np.ndarray:
    return run.tokens if run.images is None else run.tokens[run.images.slot < 0]
