"""OLMo 2 (OLMo team 2024, arXiv:2501.00656): norms behind attention and MLP, and over all queries
and all keys of a token."""

import dataclasses
from typing import ClassVar

from flax import nnx

from jaxtrain.huggingface.ops import ParameterEntry
from jaxtrain.layers.norm import PreciseRMSNorm, RMSNorm
from jaxtrain.models.blocks import attention_block
from jaxtrain.models.decoder import Decoder, DecoderOptions
from jaxtrain.models.decoder_config import DecoderConfig
from jaxtrain.models.naming import POST_NORMS, decoder_names


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    architecture: ClassVar[str] = "Olmo2ForCausalLM"
    model_type: ClassVar[str] = "olmo2"
    norm: ClassVar[type[RMSNorm]] = PreciseRMSNorm

    attention_bias: bool = False
    """On all four projections."""


class Model(Decoder):
    def make_block(self, kind: str, config: Config, options: DecoderOptions, rngs: nnx.Rngs):
        bias = config.attention_bias
        return attention_block(
            config,
            options,
            rngs,
            qkv_bias=bias,
            out_bias=bias,
            qk_norm="all_heads",
            norms=POST_NORMS,
        )


def names(config: Config) -> list[ParameterEntry]:
    """Every parameter and the tensors of a Hugging Face folder that it is made of."""
    bias = config.attention_bias
    return decoder_names(config, qkv_bias=bias, out_bias=bias, qk_norm=True, norms=POST_NORMS)
