"""Images of Gemma 3: squares of one size, whatever the picture's shape, each of as many tokens."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from typing_extensions import override

from jaxtrain.data.images.format import (
    BILINEAR,
    FormatSource,
    ImageFormat,
    read_scale,
    require,
    require_token,
)
from jaxtrain.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image as Picture


@dataclass(frozen=True)
class SquareFormat(ImageFormat):
    """Settings of the family's image processor."""

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
