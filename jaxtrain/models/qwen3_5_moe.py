"""Qwen3.5-MoE and Qwen3.6-MoE (Qwen Team 2026): Qwen3.5 with experts in all layers."""

import dataclasses
import functools
from typing import Any, ClassVar

from flax import nnx

from jaxtrain.huggingface.ops import ParameterEntry
from jaxtrain.models.decoder import Decoder, DecoderOptions
from jaxtrain.models.hybrid import linear_names, make_mixing_block, projection_names
from jaxtrain.models.hybrid_experts import (
    HybridExpertsConfig,
    shared_expert_names,
    shared_experts_mlp,
)
from jaxtrain.models.naming import attention_names, outer_names
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


class Model(Decoder):
    def make_block(self, kind: str, config: Config, options: DecoderOptions, rngs: nnx.Rngs):
        experts = functools.partial(shared_experts_mlp, normalize=True)
        return make_mixing_block(kind == "linear", config, options, rngs, experts)


def names(config: Config) -> list[ParameterEntry]:
    """Every parameter and the tensors of a Hugging Face folder that it is made of."""
    entries = outer_names(config)
    for kind, layers in config.layers_by_kind().items():
        if kind == "linear":
            entries += linear_names(config, kind, layers) + projection_names(config, kind, layers)
        else:
            entries += attention_names(kind, layers, qk_norm=True)
        entries += shared_expert_names(config, kind, layers)
    return qwen_names(config, entries)
