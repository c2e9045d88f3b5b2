"""Images within conversations: their places in messages, and the tokens that stand for them.

An image that a column holds takes the place of, in this order: a part of type "image" without an
image; "<image>" in the texts of a row without such parts; or the beginning of the first message of
the user.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxtrain.data.chat.messages import MalformedRow, Message, is_empty
from jaxtrain.data.images.format import ImageFormat
from jaxtrain.data.images.markers import PICTURE, PICTURES, mark_picture
from jaxtrain.data.images.reader import KINDS, PAYLOAD, ImageReader
from jaxtrain.data.packing.tree import Image, PlacedImages

HOLE = mark_picture("", (0, 0))
"""Marker of an image that a column holds."""
SPELLED = "<image>"
"""Placeholder in texts of ShareGPT and LLaVA, where a column holds the images."""
MAX_IMAGES = 256
"""Limit of a row."""


def describe_part(image: Image) -> dict[str, Any]:
    """Return what people and reward functions see of an image: where it lies, its hash and size."""
    path = {} if isinstance(image.source, bytes) else {"path": str(image.source)}
    return {**path, "sha256": image.key, "width": image.size[0], "height": image.size[1]}


class RowImages:
    """Images of one row by their markers."""

    def __init__(self, reader: ImageReader, origin: str = "", max_tokens: int | None = None):
        """origin: the row, for messages. max_tokens: limit of all images together, beyond which no
        further one is decoded; None: no limit."""
        self.reader, self.origin, self.max_tokens = reader, origin, max_tokens
        self._num_tokens = 0
        self.by_marker: dict[str, Image] = {}
        self._images: dict[str, Image] = {}

    @property
    def num_patches(self) -> int:
        """Patches of the images that were read, each counted once."""
        return sum(image.num_patches for image in self._images.values())

    keys = PAYLOAD
    """Keys of a part that are read."""

    def is_image(self, part: Mapping[str, Any]) -> bool:
        """Return True for a part of a content that stands for an image."""
        if part.get("type") is not None:
            return part["type"] in KINDS
        return not all(is_empty(part.get(key)) for key in PAYLOAD)

    def write(self, part: Mapping[str, Any]) -> str:
        """Return the marker of a part of a content; one without an image gets that of a column."""
        if all(is_empty(part.get(key)) for key in PAYLOAD):
            return HOLE
        return self._mark(part, len(self.by_marker) + 1)

    def place(self, messages: Sequence[Message], column: Any) -> list[Message]:
        """Put the images of a column into messages; raises MalformedRow unless there are as many
        places as images."""
        values = [] if is_empty(column) else column
        values = list(values) if isinstance(values, list | tuple) else [values]
        contents = [message.get("content") or "" for message in messages]
        holes = sum(content.count(HOLE) for content in contents)
        if values and not holes:
            if any(PICTURE in content for content in contents):
                raise MalformedRow("images both in messages and in a column")
            if any(SPELLED in content for content in contents):
                contents = [content.replace(SPELLED, HOLE) for content in contents]
            else:
                first = next((i for i, m in enumerate(messages) if m["role"] == "user"), None)
                if first is None:
                    raise MalformedRow("images without a message of the user")
                contents[first] = HOLE * len(values) + contents[first]
            holes = sum(content.count(HOLE) for content in contents)
        if holes != len(values):
            raise MalformedRow(f"{len(values)} images in the column, {holes} placeholders")
        if not values:
            return [*messages]
        markers = iter([self._mark(value, number) for number, value in enumerate(values, 1)])
        filled = []
        for message, content in zip(messages, contents, strict=True):
            first, *later = content.split(HOLE)
            content = first + "".join(next(markers) + text for text in later)
            filled.append({**message, "content": content} if later else message)
        return filled

    def read_column(self, column: Any) -> list[Image]:
        """Return the images of a column."""
        values = column if isinstance(column, list | tuple) else [column]
        return [self._read(value, number) for number, value in enumerate(values, 1)]

    def to_parts(
        self, messages: Sequence[Message], write: Callable[[Image], dict[str, Any]] = describe_part
    ) -> list[Message]:
        """Return messages with parts of type "image" and "text" in place of texts with markers.
        write: keys of an image's part besides its type."""
        return [
            {**message, "content": self._split(message["content"], write)}
            if PICTURE in (message.get("content") or "")
            else message
            for message in messages
        ]

    def _split(
        self, content: str, write: Callable[[Image], dict[str, Any]]
    ) -> list[dict[str, Any]]:
        parts, start = [], 0
        for match in PICTURES.finditer(content):
            image = self.by_marker.get(match[0])  # None: of a column
            parts.append({"type": "text", "text": content[start : match.start()]})
            parts.append({"type": "image", **({} if image is None else write(image))})
            start = match.end()
        parts.append({"type": "text", "text": content[start:]})
        return [part for part in parts if part.get("text") != ""]

    def find(self, tokens: np.ndarray, messages: Sequence[Message]) -> PlacedImages | None:
        """Return where the images of messages stand in their tokens [n], or in those of the first
        of them."""
        return place_images(tokens, self.list(messages), self.reader.format)

    def list(self, messages: Sequence[Message]) -> list[Image]:
        """Return the images of messages in order; raises MalformedRow for a place without one."""
        return list_images(messages, self.by_marker)

    def _mark(self, value: Any, number: int) -> str:
        image = self._read(value, number)
        marker = mark_picture(image.key, image.size)
        self.by_marker.setdefault(marker, image)
        return marker

    def _read(self, value: Any, number: int) -> Image:
        if number > MAX_IMAGES:
            raise MalformedRow(f"more than {MAX_IMAGES} images")
        origin = f"{self.origin}, image {number}" if self.origin else f"image {number}"
        try:
            image = self.reader.read(value, origin)
            self._images[image.key] = image
            self._num_tokens += image.num_features
            if self.max_tokens is not None and self._num_tokens > self.max_tokens:
                raise MalformedRow(f"images of more than {self.max_tokens:,} tokens")
            return image
        except MalformedRow as error:
            error.location = error.location.removeprefix(f"{self.origin}, ")
            raise


def list_images(messages: Sequence[Message], by_marker: Mapping[str, Image]) -> list[Image]:
    """Return the images of messages in order; raises MalformedRow for a place without an image."""
    markers = [
        m[0] for message in messages for m in PICTURES.finditer(message.get("content") or "")
    ]
    if HOLE in markers:
        raise MalformedRow("a part of type image holds no image")
    return [by_marker[marker] for marker in markers]


def place_images(
    tokens: np.ndarray, images: Sequence[Image], image_format: ImageFormat
) -> PlacedImages | None:
    """Return which of the images, in order, the tokens [n] of a conversation or of its beginning
    stand for; raises MalformedRow if they end within one."""
    places = np.flatnonzero(tokens == image_format.token)
    slot = np.full(len(tokens), -1, np.int32)
    begins: dict[Image, int] = {}
    done = end = 0
    for image in images:
        if done == len(places):
            break
        count = image.num_features
        if done + count > len(places):
            raise MalformedRow(f"{len(places) - done} tokens for an image of {count}")
        if image not in begins:
            begins[image], end = end, end + count
        slot[places[done : done + count]] = begins[image] + np.arange(count)
        done += count
    if done != len(places):
        raise MalformedRow(f"{len(places)} image tokens, but the images have {done}")
    return PlacedImages(tuple(begins), slot) if begins else None
