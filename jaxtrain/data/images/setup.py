"""Images of a run: what the folder of its model says, given to the tokenizer and to the packer."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxtrain.config.data import DataConfig
from jaxtrain.data.images.format import ImageFormat, read_format
from jaxtrain.data.images.patches import PatchPacker
from jaxtrain.errors import UserError


def open_packer(
    folder: Path | None,
    config: Mapping[str, Any],
    tokenizer: Any,
    data: DataConfig,
    row_tokens: int,
) -> PatchPacker | None:
    """Have rows read with their images: give the tokenizer the format of the model's images, and
    return what makes patches of them. None, and images stay refused, if they are not read.

    folder: the model's, if it has one; config: the keys of its config.json. row_tokens: T.
    """
    image_format = give_format(folder, config, tokenizer)
    if image_format is None:
        return None
    unit = 4 * image_format.merge**2
    patches = data.image_patches or row_tokens * image_format.merge**2
    return PatchPacker(image_format, -(-patches // unit) * unit)


def give_format(
    folder: Path | None, config: Mapping[str, Any], tokenizer: Any
) -> ImageFormat | None:
    """Give the tokenizer the format of the model's images, and return it; None for a model that
    reads none.

    Settings that are not followed are named on stderr: they are no reason to refuse texts.
    """
    image_format = None
    if config.get("vision_config") is not None:
        try:
            image_format = read_format(folder, config, tokenizer)
        except UserError as error:
            print(f"{error}; rows with images are left out", file=sys.stderr, flush=True)
    tokenizer.image_format = image_format
    return image_format
