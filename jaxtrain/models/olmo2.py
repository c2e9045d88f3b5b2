"""OLMo 2 (OLMo team 2024, arXiv:2501.00656): norms behind attention and MLP, and over all queries
and all keys of a token."""

import dataclasses
from typing import ClassVar

from jaxtrain.layers.norm import PreciseRMSNorm, RMSNorm
from jaxtrain.models.blocks import AttentionSpec, BlockSpec, SpecDecoder, spec_names
from jaxtrain.models.decoder_config import DecoderConfig
from jaxtrain.models.naming import POST_NORMS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    architecture: ClassVar[str] = "Olmo2ForCausalLM"
    model_type: ClassVar[str] = "olmo2"
    norm: ClassVar[type[RMSNorm]] = PreciseRMSNorm

    attention_bias: bool = False
    """On all four projections."""

    def block_spec(self, kind: str) -> BlockSpec:
        bias = self.attention_bias
        return BlockSpec(
            AttentionSpec(qkv_bias=bias, out_bias=bias, qk_norm="all_heads"), norms=POST_NORMS
        )


Model, names = SpecDecoder, spec_names
