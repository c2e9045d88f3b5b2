"""Qwen3.5 and Qwen3.6 dense (Qwen Team 2026): three layers of linear attention, one of gated full
attention, and so on; folders with a tower for images, or of text alone."""

import dataclasses
from typing import ClassVar

from jaxtrain.models.blocks import DenseSpec, SpecDecoder
from jaxtrain.models.hybrid import HybridConfig
from jaxtrain.models.qwen_vision import GridTowerConfig, QwenImageConfig, qwen_names


class TowerConfig(GridTowerConfig):
    model_type: ClassVar[str] = "qwen3_5_vision"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(QwenImageConfig, HybridConfig):
    architecture: ClassVar[str] = "Qwen3_5ForCausalLM"
    also: ClassVar[tuple[str, ...]] = ("Qwen3_5ForConditionalGeneration",)
    model_type: ClassVar[str] = "qwen3_5"
    text_type: ClassVar[str] = "qwen3_5_text"
    tower_type: ClassVar[type[TowerConfig]] = TowerConfig
    tower_tensors: ClassVar[tuple[str, ...]] = ("model.visual.",)
    section: ClassVar[tuple[int, ...]] = (11, 11, 10)

    @property
    def branch_spec(self) -> DenseSpec:
        return DenseSpec()


Model, names = SpecDecoder, qwen_names
