"""Gemma (Gemma Team 2024, arXiv:2403.08295): Llama with scaled embeddings, wide heads and norms
around a scale of 1."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from flax import nnx

from jaxtrain.huggingface.ops import ParameterEntry
from jaxtrain.layers.norm import RMSNorm, ZeroCenteredRMSNorm
from jaxtrain.models.blocks import attention_block
from jaxtrain.models.decoder import Decoder, DecoderOptions
from jaxtrain.models.decoder_config import DecoderConfig
from jaxtrain.models.naming import decoder_names


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


class Model(Decoder):
    def make_block(self, kind: str, config: Config, options: DecoderOptions, rngs: nnx.Rngs):
        bias = config.attention_bias
        return attention_block(config, options, rngs, qkv_bias=bias, out_bias=bias)


def names(config: Config) -> list[ParameterEntry]:
    """Every parameter and the tensors of a Hugging Face folder that it is made of."""
    return decoder_names(config, qkv_bias=config.attention_bias, out_bias=config.attention_bias)
