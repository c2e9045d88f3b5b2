"""Helium (Kyutai 2025): Llama that rotates pairs of adjacent dims, with norms that round once."""

import dataclasses
from typing import ClassVar

from jaxtrain.layers.norm import PreciseRMSNorm, RMSNorm
from jaxtrain.models.blocks import AttentionSpec, BlockSpec, DenseSpec, SpecDecoder, spec_names
from jaxtrain.models.decoder_config import DecoderConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    architecture: ClassVar[str] = "HeliumForCausalLM"
    model_type: ClassVar[str] = "helium"
    norm: ClassVar[type[RMSNorm]] = PreciseRMSNorm

    attention_bias: bool = False
    """On queries, keys and values."""
    mlp_bias: bool = False

    def block_spec(self, kind: str) -> BlockSpec:
        attention = AttentionSpec(qkv_bias=self.attention_bias, adjacent=True)
        return BlockSpec(attention, DenseSpec(bias=self.mlp_bias))


Model, names = SpecDecoder, spec_names
