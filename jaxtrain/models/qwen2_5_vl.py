"""Qwen2.5-VL (Bai et al. 2025, arXiv:2502.13923): Qwen2-VL with a tower most of whose layers attend
within square windows of an image.

Shapes: as in vision.py; P places of patches, in the order of the row or of its windows.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtrain_kernels import Context
from typing_extensions import override

from jaxtrain.batch import Images
from jaxtrain.errors import UserError
from jaxtrain.layers.mixer import LayerSpec
from jaxtrain.layers.norm import RMSNorm
from jaxtrain.models import qwen2_vl
from jaxtrain.models.decoder import DecoderOptions
from jaxtrain.models.qwen_vision import QwenTower
from jaxtrain.models.vision import span_patches

Model = qwen2_vl.Model
WINDOW = "window"
"""The mask of layers that attend within windows."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TowerConfig(qwen2_vl.PlainTowerConfig):
    model_type: ClassVar[str] = "qwen2_5_vl_vision"
    norm: ClassVar[type[RMSNorm]] = RMSNorm
    gated: ClassVar[bool] = True
    tensors: ClassVar[Mapping[str, str]] = {
        **{"gate": "gate_proj", "up": "up_proj", "down": "down_proj"},
        **qwen2_vl.PlainTowerConfig.merger,
    }
    window_size: int
    """Pixels of a window's side."""
    fullatt_block_indexes: tuple[int, ...]
    """Layers that attend to the whole image."""

    @property
    def window(self) -> int:
        """Features of a window's side."""
        return self.window_size // self.spatial_merge_size // self.patch_size

    @override
    def check(self) -> None:
        super().check()
        if self.window < 1:
            raise UserError(
                f"config.json: vision_config.window_size={self.window_size} is less than the"
                f" {self.patch_size * self.spatial_merge_size} pixels of a feature"
            )
        for layer in self.fullatt_block_indexes:
            if type(layer) is not int or not 0 <= layer < self.num_hidden_layers:
                raise UserError(
                    "config.json: vision_config.fullatt_block_indexes="
                    f"{list(self.fullatt_block_indexes)} must be layers from 0, below"
                    f" depth={self.num_hidden_layers}"
                )

    @override
    def layers(self) -> tuple[LayerSpec, ...]:
        full = self.fullatt_block_indexes
        masks = ("" if layer in full else WINDOW for layer in range(self.num_hidden_layers))
        return tuple(LayerSpec(mask=mask) for mask in masks)

    @override
    def make_tower(self, options: DecoderOptions, rngs: nnx.Rngs) -> "WindowTower":
        return WindowTower(self, options, rngs)


class WindowOrder(NamedTuple):
    """The order of patches in which those of a window are neighbors; int32 [B, P] each."""

    source: Any
    """Place in the row of the patch at a place of this order."""
    back: Any
    """Place in this order of the patch at a place of the row."""
    since: Any
    """First patch of a patch's window, in this order."""
    until: Any
    """End of its window."""


class WindowTower(QwenTower):
    """A `QwenTower` whose layers attend within windows, or to all of the image."""

    def __init__(self, config: TowerConfig, options: DecoderOptions, rngs: nnx.Rngs):
        super().__init__(config, options, rngs)
        self.merge, self.window = config.spatial_merge_size, config.window

    @override
    def __call__(
        self, images: Images, rng_bits_BP: jax.Array | None
    ) -> tuple[jax.Array, list[jax.Array]]:
        order = order_windows(images, self.merge, self.window)
        # The other arrays are equal for all patches of an image, whose places stay its own.
        pixels, row_col = (
            jnp.take_along_axis(x, order.source[..., None], axis=1)
            for x in (images.pixels, images.row_col)
        )
        moved = images._replace(pixels=pixels, row_col=row_col)
        hidden_BPD, captured = super().__call__(moved, rng_bits_BP)
        return jnp.take_along_axis(hidden_BPD, order.back[..., None], axis=1), captured

    @override
    def mask(self, images: Images, context: Context) -> Mapping[str, Context]:
        order = order_windows(images, self.merge, self.window)
        return {WINDOW: context._replace(since=order.since, until=order.until)}

    @override
    def mixing_flops(self, images: Images) -> float:
        since, until, grid = map(np.asarray, (images.since, images.until, images.grid))
        host = images._replace(since=since, until=until, grid=grid)
        order = order_windows(host, self.merge, self.window)
        spans = {
            "": span_patches(since, until),
            WINDOW: (order.until - order.since)[until - since > 1],
        }
        layers = self.stack.mixers()
        return sum(mixer.mixing_flops(spec, spans[spec.mask]) for spec, mixer in layers)


def order_windows(images: Images, merge: int, window: int) -> WindowOrder:
    """Return the order of patches by image, window and place within it, of arrays on a device or
    the host. merge: patches along a side of a feature; window: features along one of a window.

    Windows at the lower and right edges of an image are smaller. Both orders have the patches of a
    feature side by side, and each image at the same places.
    """
    xp: Any = np if isinstance(images.since, np.ndarray) else jnp
    since_BP, unit = images.since, merge**2
    place_BP = xp.arange(since_BP.shape[-1], dtype=np.int32) - since_BP
    feature_BP, inner_BP = place_BP // unit, place_BP % unit
    high_BP, wide_BP = (xp.maximum(images.grid[..., axis] // merge, 1) for axis in (0, 1))

    # The window at each place of its order: all before it in the row of windows are as high as it,
    # and all rows of windows above it have `window` rows of features.
    top_BP = feature_BP // (window * wide_BP) * window
    rows_BP = xp.minimum(window, high_BP - top_BP)
    left_BP = (feature_BP - top_BP * wide_BP) // (window * rows_BP) * window
    cols_BP = xp.minimum(window, wide_BP - left_BP)
    first_BP = top_BP * wide_BP + left_BP * rows_BP
    row_BP = top_BP + (feature_BP - first_BP) // cols_BP
    col_BP = left_BP + (feature_BP - first_BP) % cols_BP
    source_BP = since_BP + (row_BP * wide_BP + col_BP) * unit + inner_BP
    start_BP = since_BP + first_BP * unit
    stop_BP = xp.minimum(start_BP + rows_BP * cols_BP * unit, images.until)  # padding has less

    row_BP, col_BP = feature_BP // wide_BP, feature_BP % wide_BP
    top_BP, left_BP = row_BP // window * window, col_BP // window * window
    rows_BP = xp.minimum(window, high_BP - top_BP)
    cols_BP = xp.minimum(window, wide_BP - left_BP)
    inside_BP = (row_BP - top_BP) * cols_BP + col_BP - left_BP
    feature_BP = top_BP * wide_BP + left_BP * rows_BP + inside_BP
    return WindowOrder(source_BP, since_BP + feature_BP * unit + inner_BP, start_BP, stop_BP)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(qwen2_vl.Config):
    architecture: ClassVar[str] = "Qwen2_5_VLForConditionalGeneration"
    model_type: ClassVar[str] = "qwen2_5_vl"
    text_type: ClassVar[str] = "qwen2_5_vl_text"
    tower_type: ClassVar[type[TowerConfig]] = TowerConfig


names = qwen2_vl.names
