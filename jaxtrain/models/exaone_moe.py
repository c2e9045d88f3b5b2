"""K-EXAONE (LG AI Research 2026): EXAONE 4's attention behind norms before both layers, and in most
layers DeepSeek-V3's experts."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from jaxtrain.layers.mixer import LayerSpec
from jaxtrain.models import exaone4
from jaxtrain.models.blocks import AttentionSpec, BlockSpec, ExpertsSpec, SpecDecoder, spec_names
from jaxtrain.models.experts import GroupedExpertsConfig, list_experts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(GroupedExpertsConfig, exaone4.Config):
    architecture: ClassVar[str] = "ExaoneMoeForCausalLM"
    model_type: ClassVar[str] = "exaone_moe"
    renamed: ClassVar[Mapping[str, str]] = {
        "num_local_experts": "num_experts",
        "n_shared_experts": "num_shared_experts",
    }
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **exaone4.Config.fixed,
        **GroupedExpertsConfig.fixed,
    }
    carries: ClassVar[tuple[str, ...]] = ("mtp.",)  # pyright: ignore[reportIncompatibleVariableOverride]
    goes_stale: ClassVar[tuple[str, ...]] = carries  # pyright: ignore[reportIncompatibleVariableOverride]

    mlp_layer_types: tuple[str, ...]

    def layers(self) -> tuple[LayerSpec, ...]:
        return list_experts(exaone4.Config.layers(self), self.mlp_layer_types)

    @property
    def experts_spec(self) -> ExpertsSpec:
        return dataclasses.replace(super().experts_spec, choice_bias="e_score_correction_bias")

    def block_spec(self, kind: str) -> BlockSpec:
        return BlockSpec(AttentionSpec(qk_norm="head"), self.mlp_spec(kind))


Model, names = SpecDecoder, spec_names
