"""Seed-OSS (ByteDance 2025): Llama with biases on queries, keys and values."""

import dataclasses
from typing import ClassVar

from jaxtrain.models.blocks import AttentionSpec, BlockSpec, DenseSpec, SpecDecoder, spec_names
from jaxtrain.models.decoder_config import DecoderConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    architecture: ClassVar[str] = "SeedOssForCausalLM"
    model_type: ClassVar[str] = "seed_oss"

    attention_bias: bool = True
    """On queries, keys and values."""
    attention_out_bias: bool = False
    mlp_bias: bool = False

    def block_spec(self, kind: str) -> BlockSpec:
        qkv_bias, out_bias = self.attention_bias, self.attention_out_bias
        return BlockSpec(
            AttentionSpec(qkv_bias=qkv_bias, out_bias=out_bias), DenseSpec(bias=self.mlp_bias)
        )


Model, names = SpecDecoder, spec_names
