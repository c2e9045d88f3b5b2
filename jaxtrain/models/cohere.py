"""Command R (Cohere 2024): attention and MLP side by side behind one LayerNorm without a bias,
pairs of adjacent dims rotated, scaled logits."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from jaxtrain.layers.norm import RMSNorm, ScaledLayerNorm
from jaxtrain.models.blocks import AttentionSpec, BlockSpec, SpecDecoder, spec_names
from jaxtrain.models.decoder_config import DecoderConfig

NORMS = {"attention_norm": "input_layernorm"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CohereConfig(DecoderConfig):
    """A DecoderConfig with what all Commands have."""

    renamed: ClassVar[Mapping[str, str]] = {
        "rms_norm_eps": "layer_norm_eps",
        "factor": "logit_scale",
    }
    norm: ClassVar[type[RMSNorm]] = ScaledLayerNorm

    factor: float
    """Of logits."""
    attention_bias: bool = False
    """On all four projections."""

    @property
    def logit_scale(self) -> float:
        return self.factor

    def block_spec(self, kind: str) -> BlockSpec:
        bias = self.attention_bias
        attention = AttentionSpec(qkv_bias=bias, out_bias=bias, adjacent=True)
        return BlockSpec(attention, norms=NORMS, parallel=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(CohereConfig):
    architecture: ClassVar[str] = "CohereForCausalLM"
    model_type: ClassVar[str] = "cohere"


Model, names = SpecDecoder, spec_names
