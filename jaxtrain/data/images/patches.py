"""Patches of packed rows; threads decode the images when a batch is built, ahead of its step."""

import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from jaxtrain.batch import Images
from jaxtrain.data.chat.messages import MalformedRow
from jaxtrain.data.images.decode import decode, read_file
from jaxtrain.data.images.format import ImageFormat, Patches
from jaxtrain.data.packing.tree import Image, PlacedImages
from jaxtrain.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

MAX_CACHED = 1 << 26
"""Bytes of patches that are kept for the next image with the same hash."""
NUM_THREADS = 8


class PatchCache:
    """Patches of the images that were read last. A copy in another process begins empty."""

    def __init__(self) -> None:
        self._patches: OrderedDict[str, Patches] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type, tuple]:
        return PatchCache, ()

    def get(self, key: str) -> Patches | None:
        """Return the patches of an image, if they are kept."""
        with self._lock:
            if key in self._patches:
                self._patches.move_to_end(key)
            return self._patches.get(key)

    def add(self, key: str, patches: Patches) -> None:
        """Keep the patches of an image in place of those that were used longest ago."""
        with self._lock:
            if key not in self._patches:
                self._patches[key] = patches
                self._size += patches.pixels.nbytes
            while self._size > MAX_CACHED:
                _, oldest = self._patches.popitem(last=False)
                self._size -= oldest.pixels.nbytes


@dataclass(frozen=True)
class PatchPacker:
    """`packing.pack.ImagePacker` of one model's images."""

    format: ImageFormat
    row_patches: int | None
    """P, the patches of a row at most, a multiple of four tokens' patches; None: any number."""
    cache: PatchCache = field(default_factory=PatchCache, compare=False)

    def bucket(self, rows: Sequence[PlacedImages | None]) -> int:
        """Return 0, P/4, P/2 or P, or without P up to a quarter more than the patches, so that few
        programs are compiled."""
        needed = max((row.num_patches for row in rows if row is not None), default=0)
        if needed == 0:
            return 0
        if self.row_patches is None:
            unit = 4 * self.format.merge**2
            step = unit << max(0, (-(-needed // unit) - 1).bit_length() - 3)
            return -(-needed // step) * step
        sizes = (self.row_patches // 4, self.row_patches // 2, self.row_patches)
        return next(size for size in sizes if size >= needed)

    def pack(self, rows: Sequence[PlacedImages | None], num_patches: int) -> Images:
        """Read the images of B rows into arrays [B, P, ...]; UserError names an image that cannot
        be read any more."""
        listed = {image: None for row in rows if row is not None for image in row.images}
        threads = min(NUM_THREADS, os.cpu_count() or 1, max(len(listed), 1))
        with ThreadPoolExecutor(threads, "images") as pool:
            cut = dict(zip(listed, pool.map(self._read, listed), strict=True))
        shape = (len(rows), num_patches)
        index = np.broadcast_to(np.arange(num_patches, dtype=np.int32), shape)
        packed = Images(
            pixels=np.zeros((*shape, 3 * self.format.patch**2), np.uint8),
            since=index.copy(),
            until=index + 1,
            row_col=np.zeros((*shape, 2), np.int32),
            grid=np.ones((*shape, 2), np.int32),
            values=np.tile(self.format.values, (len(rows), 1, 1)),
        )
        for b, row in enumerate(rows):
            start = 0
            for image in row.images if row is not None else ():
                patches = cut[image]
                span = (b, slice(start, start + image.num_patches))
                packed.pixels[span] = patches.pixels
                packed.since[span] = patches.since + start
                packed.until[span] = patches.until + start
                packed.row_col[span] = patches.row_col
                packed.grid[span] = patches.grid
                start += image.num_patches
        return packed

    def _read(self, image: Image) -> Patches:
        """Decode and cut an image."""
        if (patches := self.cache.get(image.key)) is not None:
            return patches
        patches = self.format.cut(read_picture(image))
        assert len(patches.pixels) == image.num_patches, f"{image.origin}: {len(patches.pixels)}"
        self.cache.add(image.key, patches)
        return patches


def read_picture(image: Image) -> "Picture":
    """Decode an image of a row; UserError for one that cannot be read any more."""
    try:
        data = image.source if isinstance(image.source, bytes) else read_file(image.source)
        if hashlib.sha256(data).hexdigest() != image.key:
            raise MalformedRow("an image has changed since its row was tokenized")
        return decode(data)
    except MalformedRow as error:
        raise UserError(f"{image.origin}: {error}; mend it or leave the row out") from None
