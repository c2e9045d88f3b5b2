"""Images of a prompt as vLLM takes them: a placeholder for each in the tokens, and its picture.

    ours    <|vision_start|> <|image_pad|> x 300 <|vision_end|> What ...
    sent    <|vision_start|> <|image_pad|>       <|vision_end|> What ...    and a PNG
    echo    the server's tokens of the whole prompt, which must be ours

Pictures are sent as the model's format resizes them: the server's processor, which may use other
filters, then has nothing to resize.
"""

import base64
import functools
import hashlib
import io
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxtrain.data.chat.control_tokens import encode
from jaxtrain.data.images.format import ImageFormat
from jaxtrain.data.images.patches import read_picture
from jaxtrain.data.packing.tree import Image, PlacedImages

MAX_ENCODED = 64
"""Pictures that are kept as text for further requests."""
LOCKS = tuple(threading.Lock() for _ in range(16))
"""An image always gets the same one: the answers of a group ask for it at once, and all but the
first find it encoded."""


class SentPrompt(NamedTuple):
    """A prompt with images as it is sent."""

    tokens: list[int]
    """With one placeholder for each image."""
    parts: list[dict[str, Any]]
    """Picture of each placeholder, in order."""


@dataclass(frozen=True, eq=False)
class PromptImages:
    """Writer of prompts for one model. Picklable."""

    tokenizer: Any = None
    """With the format of the model's images; None: prompts are text."""
    never: tuple[int, ...] = ()
    """Tokens of images and videos, which are not drawn."""

    def write(self, tokens: Sequence[int], placed: PlacedImages) -> SentPrompt:
        """Return what is sent for tokens that begin with those of `placed`; UserError for an image
        that cannot be read any more. Decodes pictures, so not for an event loop."""
        image_format = self.tokenizer.image_format
        placeholder = self.tokenizer.convert_tokens_to_ids(image_format.placeholder)
        places = np.flatnonzero(placed.slot >= 0)
        firsts = places[np.isin(placed.slot[places], placed.starts[:-1])]
        sent: list[int] = []
        parts, start = [], 0
        for first in firsts:
            index = np.searchsorted(placed.starts, placed.slot[first], side="right") - 1
            image = placed.images[index]
            last = places[np.searchsorted(places, first) + image.num_features - 1]
            text = image_format.expand(image.size)
            opening = text.partition(image_format.placeholder)[0]
            closing = text.rpartition(image_format.placeholder)[2]
            sent += [*tokens[start : first - len(encode(self.tokenizer, opening))], placeholder]
            start = int(last) + 1 + len(encode(self.tokenizer, closing))
            parts.append(make_part(image, image_format))
        return SentPrompt([*sent, *tokens[start:]], parts)


def make_part(image: Image, image_format: ImageFormat) -> dict[str, Any]:
    """Return the part of a request that holds a picture, named by its bytes for vLLM's caches."""
    with LOCKS[int(image.key[:8], 16) % len(LOCKS)]:
        return _encode_picture(image, image_format)


@functools.lru_cache(MAX_ENCODED)
def _encode_picture(image: Image, image_format: ImageFormat) -> dict[str, Any]:
    file = io.BytesIO()
    picture = image_format.resize(read_picture(image))
    # Fast rather than small: the picture is sent with every answer of its group.
    picture.save(file, "PNG", compress_level=1)
    data = file.getvalue()
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "url": url, "uuid": hashlib.sha256(data).hexdigest()}
