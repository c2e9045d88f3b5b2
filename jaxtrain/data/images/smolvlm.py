"""Images of SmolVLM and Idefics3: the picture in tiles, and the whole of it as the last tile.

A picture is resized to a longest edge, then to multiples of the tile, both without regard to small
changes of its shape, and cut. Each tile is a segment of the tower.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from typing_extensions import override

from jaxtrain.data.images.format import (
    LANCZOS,
    FormatSource,
    ImageFormat,
    read_scale,
    require,
    require_token,
)
from jaxtrain.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

MAX_EDGE = 4096
"""Longest edge after the first resize."""
FAKE, GLOBAL = "<fake_token_around_image>", "<global-img>"


@dataclass(frozen=True)
class TiledFormat(ImageFormat):
    """Settings of the family's image processor."""

    tile: int
    """Pixels of a tile's side."""
    longest: int | None
    """Pixels of the longest edge; None: `fixed`."""
    fixed: tuple[int, int] | None
    """Width and height of every picture."""
    splits: bool
    """False: the whole picture is the only tile."""

    @override
    @classmethod
    def read(cls, source: FormatSource) -> "TiledFormat":
        config, settings, tokenizer, folder = source
        if settings is None:  # pictures are not cut
            edge = {"longest_edge": source.vision.get("image_size", 224)}
            settings = {"max_image_size": edge, "size": edge, "do_image_splitting": False}
        require(settings, {"do_resize": True, "do_pad": True}, folder)
        vision, size = source.vision, settings.get("size") or {}
        tile = int((settings.get("max_image_size") or {}).get("longest_edge", 364))
        patch, merge = int(vision.get("patch_size", 32)), int(config.get("scale_factor", 2))
        image_size = int(vision.get("image_size", 224))
        if tile != image_size or tile // patch % merge:
            raise UserError(
                f"{folder}: tiles of {tile} pixels (max_image_size) do not fit a tower for"
                f" {image_size} pixels with patches of {patch}, {merge} x {merge} to a token"
            )
        longest = size.get("longest_edge") or (None if size.get("height") else 4 * 364)
        fixed = (int(size["width"]), int(size["height"])) if longest is None else None
        placeholder = getattr(tokenizer, "image_token", None) or "<image>"
        token = require_token(tokenizer, placeholder, folder, config.get("image_token_id"))
        return cls(
            placeholder, token, patch, merge, *read_scale(settings, folder),
            int(settings.get("resample", LANCZOS)), tile, longest, fixed,
            bool(settings.get("do_image_splitting", True)),
        )  # fmt: skip

    @override
    def settings(self) -> dict[str, Any]:
        size: dict[str, Any] = {"longest_edge": self.longest}
        if self.fixed is not None:
            size = dict(zip(("width", "height"), self.fixed, strict=True))
        return {
            "image_processor_type": "SmolVLMImageProcessor",
            "size": size,
            "max_image_size": {"longest_edge": self.tile},
            "do_image_splitting": self.splits,
            "do_pad": True,
        }

    @override
    def count(self, size: tuple[int, int]) -> tuple[int, int]:
        rows, cols = self.count_tiles(size)
        tiles = rows * cols + 1
        side = self.tile // self.patch
        return tiles * side**2, tiles * (side // self.merge) ** 2

    @override
    def expand(self, size: tuple[int, int]) -> str:
        rows, cols = self.count_tiles(size)
        tokens = self.placeholder * (self.tile // self.patch // self.merge) ** 2
        overview = f"{FAKE}{GLOBAL}{tokens}{FAKE}"
        if not rows:
            return overview
        lines = (
            "".join(f"{FAKE}<row_{row}_col_{col}>{tokens}" for col in range(1, cols + 1))
            for row in range(1, rows + 1)
        )
        return "".join(f"{line}\n" for line in lines) + f"\n{overview}"

    @override
    def resize(self, picture: "Picture") -> "Picture":
        first, second = self._sizes(picture.size)
        picture = picture.resize(first, self.resample)
        return picture.resize(second if self.splits else (self.tile, self.tile), self.resample)

    @override
    def segments(self, picture: "Picture") -> list[np.ndarray]:
        picture = self.resize(picture)
        if not self.splits:
            return [np.asarray(picture)]
        rows, cols = self.count_tiles_of(picture.size)
        pixels, side = np.asarray(picture), self.tile
        tiles = [
            pixels[row * side : (row + 1) * side, col * side : (col + 1) * side]
            for row in range(rows)
            for col in range(cols)
        ]
        return [*tiles, np.asarray(picture.resize((side, side), self.resample))]

    def count_tiles(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return the rows and columns of tiles; 0 of each for a picture that is not cut."""
        return self.count_tiles_of(self._sizes(size)[1]) if self.splits else (0, 0)

    def count_tiles_of(self, size: tuple[int, int]) -> tuple[int, int]:
        """Count the tiles of a picture whose edges are multiples of a tile's."""
        width, height = size
        if width <= self.tile and height <= self.tile:
            return 0, 0
        return height // self.tile, width // self.tile

    def _fit(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return the size after the first resize."""
        if self.longest is None:
            assert self.fixed is not None
            return self.fixed
        width, height = size
        aspect = width / height
        # As transformers computes it: shorter edges are rounded down, then up to even numbers.
        if width >= height:
            width, height = self.longest, int(self.longest / aspect)
            height += height % 2
        else:
            width, height = int(self.longest * aspect), self.longest
            width += width % 2
        width, height = max(width, 1), max(height, 1)
        aspect = width / height
        if width >= height and width > MAX_EDGE:
            width, height = MAX_EDGE, int(MAX_EDGE / aspect)
        elif height > width and height > MAX_EDGE:
            width, height = int(MAX_EDGE * aspect), MAX_EDGE
        return max(width, 1), max(height, 1)

    def _sizes(self, size: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the sizes after the first resize and the second, to multiples of a tile."""
        width, height = first = self._fit(size)
        aspect, tile = width / height, self.tile
        if width >= height:
            width = math.ceil(width / tile) * tile
            height = math.ceil(int(width / aspect) / tile) * tile
        else:
            height = math.ceil(height / tile) * tile
            width = math.ceil(int(height * aspect) / tile) * tile
        return first, (width, height)
