"""Qwen3.5-MoE and Qwen3.6-MoE (Qwen Team 2026): Qwen3.5 with experts in all layers."""

import dataclasses
from typing import Any, ClassVar

from jaxtrain.models.blocks import SpecDecoder
from jaxtrain.models.hybrid_experts import HybridExpertsConfig
from jaxtrain.models.qwen_vision import GridTowerConfig, QwenImageConfig, qwen_names


class TowerConfig(GridTowerConfig):
    model_type: ClassVar[str] = "qwen3_5_moe_vision"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(QwenImageConfig, HybridExpertsConfig):
    architecture: ClassVar[str] = "Qwen3_5MoeForCausalLM"
    also: ClassVar[tuple[str, ...]] = ("Qwen3_5MoeForConditionalGeneration",)
    model_type: ClassVar[str] = "qwen3_5_moe"
    text_type: ClassVar[str] = "qwen3_5_moe_text"
    tower_type: ClassVar[type[TowerConfig]] = TowerConfig
    tower_tensors: ClassVar[tuple[str, ...]] = ("model.visual.",)
    section: ClassVar[tuple[int, ...]] = (11, 11, 10)

    intermediate_size: int = 0
    """There is no dense layer."""

    def to_hf(self) -> dict[str, Any]:
        raw = super().to_hf()
        raw.get("text_config", raw).pop("intermediate_size")
        return raw


Model, names = SpecDecoder, qwen_names
