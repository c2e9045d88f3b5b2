"""Values of rows as images: paths, URLs, base64, bytes, and the objects that hold one of them.

| form                                                         | written by                     |
|--------------------------------------------------------------|--------------------------------|
| `{"type": "image", "image" or "path", "url", "base64": ...}` | parts of a message's content   |
| `{"type": "image_url", "image_url": {"url": "data:..."}}`    | requests to OpenAI's API       |
| `{"bytes": ..., "path": ...}`                                | Parquet, by the datasets library |
| a path, a URL, a data URL; bytes                             | columns `image` and `images`   |

Relative paths start in the dataset's folder, or in its `image_folder`; none may leave that. URLs
are fetched from the hosts of `image_hosts` alone.
"""

import base64
import binascii
import hashlib
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np

from jaxtrain.config.data import DatasetConfig
from jaxtrain.data.chat.messages import MalformedRow, is_empty
from jaxtrain.data.images.decode import MAX_BYTES, decode, measure, read_file
from jaxtrain.data.images.fetch import fetch
from jaxtrain.data.images.format import ImageFormat
from jaxtrain.data.packing.tree import Image, PlacedImages
from jaxtrain.text_safety import name_type, show

PAYLOAD = ("image", "path", "url", "base64", "image_url", "bytes")
"""Keys of a part, or of an object in a column, that hold an image or say where it lies."""
KINDS = ("image", "image_url")
"""Types of parts that stand for an image."""
MAX_MEASURED = 1 << 16
"""Limit of images whose sizes are remembered."""
DECODING = threading.BoundedSemaphore(4)
"""Limit of images of requests that are decoded at once: one of MAX_PIXELS takes a gigabyte."""


@dataclass(frozen=True)
class ImageReader:
    """Reader of a dataset's images for one model. Picklable."""

    format: ImageFormat
    folder: Path | None
    """Where relative paths start; None: there is no such folder."""
    hosts: tuple[str, ...] = ()
    """Hosts whose URLs are fetched, in lower case."""
    measured: dict[str, tuple[int, int]] = field(default_factory=dict, compare=False)
    """Sizes of images that were decoded, by their hashes."""
    decodes: bool = False
    """True: an image is decoded as the tower gets it before it is accepted, so that patches can be
    made of whatever is."""

    def read(self, value: Any, origin: str) -> Image:
        """Read an image far enough for its tokens: its size; and check that it can be decoded. One
        that was read before stays what it is.

        origin: row and number of the image. Raises MalformedRow with the reason and `location`.
        """
        image = value.get("image") if isinstance(value, Mapping) else value
        if isinstance(image, Image):
            return image
        try:
            source = self.locate(value)
            data = source if isinstance(source, bytes) else read_file(source)
            if len(data) > MAX_BYTES:
                raise MalformedRow(f"an image has more than {MAX_BYTES:,} bytes")
            key = hashlib.sha256(data).hexdigest()
            # Another thread may clear the table at any time.
            if (size := self.measured.get(key)) is None:
                size = self._measure(data)
                if len(self.measured) >= MAX_MEASURED:
                    self.measured.clear()
                self.measured[key] = size
            patches, features = self.format.count(size)
        except MalformedRow as error:
            error.location = f"{origin} ({describe(value)})"
            raise
        return Image(key, size, patches, features, source, origin)

    def _measure(self, data: bytes) -> tuple[int, int]:
        if not self.decodes:
            return measure(data)
        with DECODING:
            return decode(data).size

    def move_cut(self, placed: PlacedImages, limit: int, encode: Callable[[str], list[int]]) -> int:
        """Return where a sequence is cut that has room for `limit` tokens: there, or before the
        text of an image that stands across it."""
        places = np.flatnonzero(placed.slot >= 0)
        firsts = np.isin(placed.slot[places], placed.starts[:-1])
        for index in np.flatnonzero(firsts)[::-1]:
            number = np.searchsorted(placed.starts, placed.slot[places[index]], side="right") - 1
            image = placed.images[number]
            opening, closing = self.format.around(image.size)
            start = int(places[index]) - len(encode(opening))
            last = int(places[index + image.num_features - 1])
            if start < limit <= last + len(encode(closing)):
                limit = start
        return limit

    def locate(self, value: Any) -> Path | bytes:
        """Return the bytes of an image, or the path of its file; raises MalformedRow."""
        if isinstance(value, bytes | bytearray | memoryview):
            return bytes(value)
        if isinstance(value, Mapping):
            filled = [key for key in PAYLOAD if not is_empty(value.get(key))]
            if value.get("bytes"):  # the path beside them is only a name
                filled = ["bytes"]
            if len(filled) != 1:
                named = " and ".join(filled) or "none of them"
                raise MalformedRow(f"an image needs one of {', '.join(PAYLOAD)}; it has {named}")
            inner = value[filled[0]]
            return _decode_base64(inner) if filled[0] == "base64" else self.locate(inner)
        if not isinstance(value, str):
            raise MalformedRow(f"an image is {name_type(value)}, not a path, a URL or bytes")
        if value[:5].lower() == "data:":
            kind, comma, text = value.partition(",")
            if not comma or not kind.lower().endswith(";base64"):
                raise MalformedRow("a data URL of an image is not in base64")
            return _decode_base64(text)
        if value[:7].lower() == "file://":
            return self._find(unquote(value[7:]))
        if "://" in value[:16]:
            return fetch(value, self.hosts)
        return self._find(value)

    def _find(self, text: str) -> Path:
        """Return the path of a file within the folder."""
        if "\0" in text or self.folder is None and not os.path.isabs(text):
            raise MalformedRow("an image has no folder; name one as image_folder of its dataset")
        folder = os.path.abspath(self.folder or os.sep)
        path = os.path.normpath(os.path.join(folder, text))
        if self.folder is None or os.path.commonpath([folder, path]) != folder:
            raise MalformedRow(f"an image lies outside of {folder} (image_folder of its dataset)")
        return Path(path)


def open_reader(dataset: DatasetConfig | None, image_format: ImageFormat) -> ImageReader:
    """Build the reader of a dataset's images; without a dataset no path is read."""
    folder = None
    if dataset is None:
        return ImageReader(image_format, None)
    if dataset.image_folder is not None:
        folder = Path(dataset.image_folder).expanduser()
    elif "://" not in dataset.path and not dataset.path.startswith("builtin:"):
        path = Path(dataset.path).expanduser()
        folder = path if path.is_dir() else path.parent if path.parent.is_dir() else None
    hosts = tuple(host.lower() for host in dataset.image_hosts)  # as urlsplit writes them
    return ImageReader(image_format, folder, hosts)


def describe(value: Any) -> str:
    """Return a short text for an image of a row, without what it holds."""
    if isinstance(value, Mapping):
        shown = [key for key in ("path", "url", "image", "image_url") if value.get(key)]
        return describe(value[shown[0]]) if shown else "bytes"
    if isinstance(value, str):
        return "a data URL" if value[:5].lower() == "data:" else show(value, 80)
    return "bytes" if isinstance(value, bytes) else name_type(value)


def _decode_base64(text: Any) -> bytes:
    if not isinstance(text, str):
        raise MalformedRow(f"base64 of an image is {name_type(text)}, not a text")
    if len(text) > MAX_BYTES * 4 // 3 + 4:
        raise MalformedRow(f"an image has more than {MAX_BYTES:,} bytes")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise MalformedRow("an image is no base64") from None
