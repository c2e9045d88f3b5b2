"""Qwen3-VL dense (Qwen Team 2025, arXiv:2511.21631): Qwen3's network, whose pairs of dims turn by
time, row or column, and whose first layers get features of the tower, too."""

import dataclasses
from typing import Any, ClassVar

from flax import nnx

from jaxtrain.errors import UserError
from jaxtrain.huggingface.ops import ParameterEntry
from jaxtrain.layers.mixer import LayerSpec
from jaxtrain.models import qwen3
from jaxtrain.models.decoder import DecoderOptions
from jaxtrain.models.multimodal import ImageTextConfig
from jaxtrain.models.naming import with_prefix
from jaxtrain.models.qwen_vision import QwenTowerConfig, QwenVision, qwen_tower_names

SECTION = (24, 20, 20)


class TowerConfig(QwenTowerConfig):
    model_type: ClassVar[str] = "qwen3_vl_vision"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(ImageTextConfig):
    architecture: ClassVar[str] = "Qwen3VLForConditionalGeneration"
    model_type: ClassVar[str] = "qwen3_vl"
    text_type: ClassVar[str] = "qwen3_vl_text"
    tower_type: ClassVar[type[TowerConfig]] = TowerConfig
    prefixes: ClassVar[tuple[str, ...]] = ("model.language_model.",)
    rope_keys: ClassVar[tuple[str, ...]] = ("mrope_section", "mrope_interleaved")
    media: ClassVar[tuple[str, ...]] = ("image_token_id", "video_token_id")
    """Not what stands before and behind an image: those are read like text."""

    attention_bias: bool = False
    """On all four projections."""

    def check(self) -> None:
        super().check()
        if self.vision is not None and self.vision.out_hidden_size != self.hidden_size:
            raise UserError(
                f"config.json: vision_config.out_hidden_size={self.vision.out_hidden_size} must be"
                f" the text's hidden_size={self.hidden_size}"
            )

    @property
    def merge(self) -> int:
        return self.vision.spatial_merge_size

    @property
    def rope_axes(self) -> tuple[int, ...]:
        section = dict(self.rope).get("mrope_section", SECTION)
        return interleave_axes(self.head_size // 2, section)

    def layers(self) -> tuple[LayerSpec, ...]:
        count = 0 if self.vision is None else len(self.vision.deepstack_visual_indexes)
        if count > self.num_hidden_layers:
            raise UserError(
                f"config.json: vision_config.deepstack_visual_indexes names {count} layers; the"
                f" text has num_hidden_layers={self.num_hidden_layers}"
            )
        adds = (index if index < count else None for index in range(self.num_hidden_layers))
        return tuple(LayerSpec(adds=index) for index in adds)


def interleave_axes(pairs: int, section: Any) -> tuple[int, ...]:
    """Return what each pair of dims turns by, 0 time, 1 row, 2 column, in turn as long as section
    [time, row, column] of them last. Raises UserError for another section."""
    if len(section) != 3 or any(type(n) is not int or n < 0 for n in section):
        raise UserError(
            f"config.json: mrope_section={list(section)} must be three numbers of pairs"
        )
    return tuple(
        pair % 3 if pair % 3 and pair < 3 * section[pair % 3] else 0 for pair in range(pairs)
    )


class Model(qwen3.Model):
    def make_vision(self, config: Config, options: DecoderOptions, rngs: nnx.Rngs) -> QwenVision:
        return QwenVision(config.vision, options, rngs)


def names(config: Config) -> list[ParameterEntry]:
    """Every parameter and the tensors of a Hugging Face folder that it is made of."""
    tower = qwen_tower_names(config.vision, "model.visual.")
    return [*with_prefix(qwen3.names(config), config.prefix), *tower]
