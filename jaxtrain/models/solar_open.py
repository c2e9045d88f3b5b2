"""Solar Open (Upstage 2025): DeepSeek-V3's experts in every layer, behind Llama's
attention."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from jaxtrain.models.blocks import AttentionSpec, BlockSpec, SpecDecoder, spec_names
from jaxtrain.models.experts import GroupedExpertsConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(GroupedExpertsConfig):
    architecture: ClassVar[str] = "SolarOpenForCausalLM"
    model_type: ClassVar[str] = "solar_open"
    rope_keys: ClassVar[tuple[str, ...]] = ("partial_rotary_factor",)
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **GroupedExpertsConfig.fixed,
        "first_k_dense_replace": (0,),
        "intermediate_size": (),
    }

    intermediate_size: int = 0
    """There is no dense layer."""
    attention_bias: bool = False
    """On queries, keys and values."""

    def to_hf(self) -> dict[str, Any]:
        fixed = dict(self.fixed_attributes)
        aliases = ("intermediate_size", "first_k_dense_replace")
        return {k: v for k, v in super().to_hf().items() if k not in aliases or k in fixed}

    def block_spec(self, kind: str) -> BlockSpec:
        return BlockSpec(AttentionSpec(qkv_bias=self.attention_bias), self.experts_spec)


Model, names = SpecDecoder, spec_names
