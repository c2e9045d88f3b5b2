"""Qwen3-VL dense (Qwen Team 2025, arXiv:2511.21631): Qwen3's network, whose pairs of dims turn by
time, row or column, and whose first layers get features of the tower, too."""

import dataclasses
from typing import ClassVar

from jaxtrain.models import qwen3
from jaxtrain.models.blocks import SpecDecoder
from jaxtrain.models.qwen_vision import GridTowerConfig, QwenImageConfig, qwen_names


class TowerConfig(GridTowerConfig):
    model_type: ClassVar[str] = "qwen3_vl_vision"
    deep: ClassVar[bool] = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(QwenImageConfig):
    architecture: ClassVar[str] = "Qwen3VLForConditionalGeneration"
    model_type: ClassVar[str] = "qwen3_vl"
    text_type: ClassVar[str] = "qwen3_vl_text"
    tower_type: ClassVar[type[TowerConfig]] = TowerConfig
    prefixes: ClassVar[tuple[str, ...]] = ("model.language_model.",)
    rope_keys: ClassVar[tuple[str, ...]] = ("mrope_section", "mrope_interleaved")

    attention_bias: bool = False
    """On all four projections."""
    block_spec = qwen3.Config.block_spec


Model, names = SpecDecoder, qwen_names
