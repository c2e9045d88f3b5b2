"""Gemma (Gemma Team 2024, arXiv:2403.08295): Llama with scaled embeddings, wide heads and norms
around a scale of 1."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from jaxtrain.layers.norm import RMSNorm, ZeroCenteredRMSNorm
from jaxtrain.models.blocks import AttentionSpec, BlockSpec, SpecDecoder, spec_names
from jaxtrain.models.decoder_config import DecoderConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    architecture: ClassVar[str] = "GemmaForCausalLM"
    model_type: ClassVar[str] = "gemma"
    norm: ClassVar[type[RMSNorm]] = ZeroCenteredRMSNorm
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {"hidden_activation": ("gelu_pytorch_tanh",)}

    attention_bias: bool = False
    """On all four projections."""

    @property
    def embedding_scale(self) -> float:
        return self.hidden_size**0.5

    def block_spec(self, kind: str) -> BlockSpec:
        bias = self.attention_bias
        return BlockSpec(AttentionSpec(qkv_bias=bias, out_bias=bias))


Model, names = SpecDecoder, spec_names
