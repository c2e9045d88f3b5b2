"""FlexOlmo (Shi et al. 2025, arXiv:2507.07024): OLMo 2 with OLMoE's experts in every layer."""

import dataclasses
from typing import ClassVar

from jaxtrain.layers.norm import PreciseRMSNorm, RMSNorm
from jaxtrain.models import olmoe
from jaxtrain.models.blocks import AttentionSpec, BlockSpec, SpecDecoder, spec_names
from jaxtrain.models.naming import POST_NORMS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(olmoe.OlmoExpertsConfig):
    architecture: ClassVar[str] = "FlexOlmoForCausalLM"
    model_type: ClassVar[str] = "flex_olmo"
    norm: ClassVar[type[RMSNorm]] = PreciseRMSNorm

    def block_spec(self, kind: str) -> BlockSpec:
        bias = self.attention_bias
        attention = AttentionSpec(qkv_bias=bias, out_bias=bias, qk_norm="all_heads")
        return BlockSpec(attention, self.experts_spec, norms=POST_NORMS)


Model, names = SpecDecoder, spec_names
