"""Images of Gemma: in Gemma 3 squares of one size, whatever the picture's shape; in Gemma 4 as
large as a number of tokens allows, near their own shape."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from typing_extensions import override

from jaxtrain.data.images.format import (
    BICUBIC,
    BILINEAR,
    FormatSource,
    ImageFormat,
    ResizedFormat,
    read_scale,
    require,
    require_token,
)
from jaxtrain.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image as Picture


@dataclass(frozen=True)
class SquareFormat(ImageFormat):
    """Settings of Gemma 3's image processor."""

    served: ClassVar[bool] = False  # placeholders merge with the text around
    side: int
    """Pixels of a resized picture's side."""
    soft: str
    """Text of a feature's token; the template writes what begins an image."""
    closing: str

    @override
    @classmethod
    def read(cls, source: FormatSource) -> "SquareFormat":
        config, settings, tokenizer, folder = source
        patch = int(source.vision.get("patch_size", 16))
        side = int(source.vision.get("image_size", 224))
        default: dict[str, Any] = {"size": {"height": side, "width": side}}
        settings = default if settings is None else settings
        settings = {key: value for key, value in settings.items() if value is not None}
        require(settings, {"do_resize": True, "do_pan_and_scan": False}, folder)
        size = settings.get("size") or {}
        if (size.get("height"), size.get("width")) != (side, side):
            raise UserError(
                f"{folder}: its image processor makes pictures of {size.get('width')} x"
                f" {size.get('height')} pixels (size); the tower is made for {side} x {side}"
            )
        edge = int(config.get("mm_tokens_per_image", 256) ** 0.5)
        texts = {
            name: getattr(tokenizer, name, None) or text
            for name, text in (
                ("boi_token", "<start_of_image>"),
                ("image_token", "<image_soft_token>"),
                ("eoi_token", "<end_of_image>"),
            )
        }
        expected = config.get("image_token_index", config.get("image_token_id"))
        token = require_token(tokenizer, texts["image_token"], folder, expected)
        require_token(tokenizer, texts["boi_token"], folder)
        return cls(
            texts["boi_token"], token, patch, side // patch // edge, *read_scale(settings, folder),
            int(settings.get("resample", BILINEAR)), side, texts["image_token"],
            texts["eoi_token"],
        )  # fmt: skip

    @override
    def settings(self) -> dict[str, Any]:
        return {
            "image_processor_type": "Gemma3ImageProcessor",
            "size": {"height": self.side, "width": self.side},
        }

    @override
    def count(self, size: tuple[int, int]) -> tuple[int, int]:
        patches = (self.side // self.patch) ** 2
        return patches, patches // self.merge**2

    @override
    def expand(self, size: tuple[int, int]) -> str:
        tokens = self.soft * self.count(size)[1]
        return f"\n\n{self.placeholder}{tokens}{self.closing}\n\n"

    @property
    @override
    def feature_text(self) -> str:
        return self.soft

    @override
    def around(self, size: tuple[int, int]) -> tuple[str, str]:
        return self.placeholder, self.closing  # line breaks may be one token with what is beside

    @override
    def segments(self, picture: "Picture") -> list[np.ndarray]:
        return [np.asarray(picture.resize((self.side, self.side), self.resample))]


BUDGETS = (70, 140, 280, 560, 1120)
"""Most tokens of an image of Gemma 4."""


@dataclass(frozen=True)
class BudgetFormat(ResizedFormat):
    """Settings of Gemma 4's image processor."""

    served: ClassVar[bool] = False  # a resized picture may be resized again
    budget: int
    """Most tokens of an image."""
    opening: str
    closing: str

    @override
    @classmethod
    def read(cls, source: FormatSource) -> "BudgetFormat":
        config, settings, tokenizer, folder = source
        patch = int(source.vision.get("patch_size", 16))
        merge = int(source.vision.get("pooling_kernel_size", 3))
        positions = int(source.vision.get("position_embedding_size", 10240))
        settings = {key: value for key, value in (settings or {}).items() if value is not None}
        sizes = {"patch_size": patch, "pooling_kernel_size": merge}
        # What transformers takes where a file of settings leaves them out, whatever the tower has.
        defaults = {} if source.settings is None else {"patch_size": 16, "pooling_kernel_size": 3}
        require({**sizes, **defaults, **settings}, {"do_resize": True, **sizes}, folder)
        budget = settings.get("max_soft_tokens", 280)
        if budget not in BUDGETS or budget * merge > positions:
            raise UserError(
                f"{folder}: its image processor sets max_soft_tokens to {budget}; it must be one of"
                f" {', '.join(map(str, BUDGETS))}, and the tower has {positions} positions"
                f" (position_embedding_size) for {merge} patches of each token along a side"
            )
        if not settings.get("do_normalize", False):  # the tower shifts and scales pixels
            settings |= {"do_normalize": True, "image_mean": [0.0] * 3, "image_std": [1.0] * 3}
        image, *around = (
            getattr(tokenizer, name, None) or text
            for name, text in (
                ("image_token", "<|image|>"),
                ("boi_token", "<|image>"),
                ("eoi_token", "<image|>"),
            )
        )
        token = require_token(tokenizer, image, folder, config.get("image_token_id"))
        for text in around:
            require_token(tokenizer, text, folder)
        return cls(
            image, token, patch, merge, *read_scale(settings, folder),
            int(settings.get("resample", BICUBIC)), budget, *around,
        )  # fmt: skip

    @override
    def settings(self) -> dict[str, Any]:
        return {
            "image_processor_type": "Gemma4ImageProcessor",
            "do_normalize": (self.mean, self.std) != ((0.0,) * 3, (1.0,) * 3),
            "max_soft_tokens": self.budget,
            "patch_size": self.patch,
            "pooling_kernel_size": self.merge,
        }

    @override
    def expand(self, size: tuple[int, int]) -> str:
        return f"{self.opening}{self.placeholder * self.count(size)[1]}{self.closing}"

    @override
    def segments(self, picture: "Picture") -> list[np.ndarray]:
        return [np.asarray(picture.resize(self.fit(picture.size), self.resample))]

    @override
    def fit(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return the width and height of a resized picture, the largest multiples of a token's
        pixels within the budget."""
        width, height = size
        unit, most = self.patch * self.merge, self.budget * (self.patch * self.merge) ** 2
        factor = math.sqrt(most / (height * width))
        high, wide = (math.floor(factor * edge / unit) for edge in (height, width))
        if not high:
            high, wide = 1, min(width // height, self.budget)
        elif not wide:
            high, wide = min(height // width, self.budget), 1
        return wide * unit, high * unit
