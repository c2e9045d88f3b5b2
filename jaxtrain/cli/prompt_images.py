"""Images of prompts of the verb `generate`."""

import base64
import os
from typing import Any

import numpy as np

from jaxtrain.config import DatasetConfig
from jaxtrain.data.chat.messages import MalformedRow
from jaxtrain.data.chat.rows import IMAGES
from jaxtrain.data.chat.tokenize import open_images
from jaxtrain.data.images.reader import KINDS
from jaxtrain.data.packing.tree import Image, PlacedImages
from jaxtrain.errors import UserError


def holds_images(row: dict[str, Any], dataset: DatasetConfig | None) -> bool:
    """Return True if a row seems to hold images; dataset: names its columns."""
    fields = {} if dataset is None else dataset.fields
    return any(row.get(fields.get(name, name)) for name in IMAGES) or _has_parts(row)


def _has_parts(value: Any) -> bool:
    """Return True if there seem to be images anywhere in a value of JSON."""
    if isinstance(value, list):
        return any(map(_has_parts, value))
    if not isinstance(value, dict):
        return False
    named = value.get("type") in KINDS or any(value.get(key) for key in (*KINDS, *IMAGES))
    return named or any(map(_has_parts, value.values()))


def open_readers(path: str | None, dataset: DatasetConfig | None, tokenizer: Any) -> Any:
    """Return the readers of images of rows of --input, at `path` or of a dataset, and of those that
    --image names; each None for a model that reads none."""
    if dataset is None and path:
        dataset = DatasetConfig(path=path)
    named = DatasetConfig(path=os.sep, image_folder=os.sep)
    return open_images(dataset, tokenizer), open_images(named, tokenizer)


def find_images(request: dict[str, Any], tokens: list[int]) -> PlacedImages | None:
    """Return where the images of a request stand in its tokens, None without; UserError where the
    chat template leaves some out."""
    if (images := request.get("images")) is None:
        return None
    try:
        return images.find(np.asarray(tokens), request["prompt"])
    except MalformedRow as error:
        raise UserError(error.describe(images.origin)) from None


def write_image(image: Image) -> dict[str, str]:
    """Return the key of a part that holds an image."""
    if isinstance(image.source, bytes):
        return {"base64": base64.b64encode(image.source).decode()}
    return {"path": str(image.source)}
