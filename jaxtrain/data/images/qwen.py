"""Images of Qwen vision-language models: whole, of any size within bounds, near their own shape.

A picture is resized to multiples of a feature's pixels, and is one segment of the tower.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from typing_extensions import override

from jaxtrain.data.chat.messages import MalformedRow
from jaxtrain.data.images.format import (
    BICUBIC,
    FormatSource,
    ResizedFormat,
    read_scale,
    require,
    require_token,
)
from jaxtrain.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

MAX_ASPECT = 200


@dataclass(frozen=True)
class WholeFormat(ResizedFormat):
    """Settings of the family's image processor."""

    min_pixels: int
    """Pixels of a resized picture, at least; smaller ones grow."""
    max_pixels: int

    @override
    @classmethod
    def read(cls, source: FormatSource) -> "WholeFormat":
        config, settings, tokenizer, folder = source
        patch = source.vision.get("patch_size", 16)
        merge = source.vision.get("spatial_merge_size", 2)
        if settings is None:  # pictures keep about their size
            edges = {"shortest_edge": (patch * merge) ** 2, "longest_edge": 1 << 20}
            settings = {"size": edges, "patch_size": patch, "merge_size": merge}
            settings |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
        require(settings, {"do_resize": True, "patch_size": patch, "merge_size": merge}, folder)
        size = settings.get("size") or {}
        least = int(settings.get("min_pixels") or size.get("shortest_edge") or 0)
        most = int(settings.get("max_pixels") or size.get("longest_edge") or 0)
        needed = {"size": least and most, "image_mean": "image_mean" in settings}
        for name, present in needed.items():  # what stands for absent ones has changed over time
            if not present:
                raise UserError(
                    f"{folder}: its image processor does not say {name}; take"
                    " preprocessor_config.json from where the model was published"
                )
        placeholder = getattr(tokenizer, "image_token", None) or "<|image_pad|>"
        token = require_token(tokenizer, placeholder, folder, config.get("image_token_id"))
        return cls(
            placeholder, token, patch, merge, *read_scale(settings, folder),
            int(settings.get("resample", BICUBIC)), least, most,
        )  # fmt: skip

    @override
    def settings(self) -> dict[str, Any]:
        return {
            "image_processor_type": "Qwen2VLImageProcessor",
            "size": {"shortest_edge": self.min_pixels, "longest_edge": self.max_pixels},
            "patch_size": self.patch,
            "merge_size": self.merge,
            "temporal_patch_size": 2,
        }

    @override
    def expand(self, size: tuple[int, int]) -> str:
        return self.placeholder * self.count(size)[1]

    @override
    def around(self, size: tuple[int, int]) -> tuple[str, str]:
        return "<|vision_start|>", "<|vision_end|>"  # written by the chat template

    @override
    def resize(self, picture: "Picture") -> "Picture":
        return picture.resize(self.fit(picture.size), self.resample)

    @override
    def segments(self, picture: "Picture") -> list[np.ndarray]:
        return [np.asarray(self.resize(picture))]

    @override
    def fit(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return the width and height of a resized picture; raises MalformedRow for one that is too
        narrow."""
        width, height = size
        if max(size) > MAX_ASPECT * min(size):
            raise MalformedRow(f"an image is more than {MAX_ASPECT} times as long as wide")
        unit, area = self.patch * self.merge, width * height
        fitted = round(width / unit) * unit, round(height / unit) * unit
        if fitted[0] * fitted[1] > self.max_pixels:
            factor = math.sqrt(area / self.max_pixels)
            edges = (max(unit, math.floor(n / factor / unit) * unit) for n in size)
        elif fitted[0] * fitted[1] < self.min_pixels:
            factor = math.sqrt(self.min_pixels / area)
            edges = (math.ceil(n * factor / unit) * unit for n in size)
        else:
            return fitted
        width, height = edges
        return width, height
