"""Llama 3.x (Grattafiori et al. 2024, arXiv:2407.21783), with its rope scaling."""

import dataclasses
from typing import ClassVar

from jaxtrain.models.blocks import AttentionSpec, BlockSpec, DenseSpec, SpecDecoder, spec_names
from jaxtrain.models.decoder_config import DecoderConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    architecture: ClassVar[str] = "LlamaForCausalLM"
    model_type: ClassVar[str] = "llama"

    attention_bias: bool = False
    """On all four projections."""
    mlp_bias: bool = False

    def block_spec(self, kind: str) -> BlockSpec:
        bias = self.attention_bias
        return BlockSpec(AttentionSpec(qkv_bias=bias, out_bias=bias), DenseSpec(bias=self.mlp_bias))


Model, names = SpecDecoder, spec_names
