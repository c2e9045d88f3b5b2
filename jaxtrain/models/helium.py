"""Helium (Kyutai 2025): Llama that rotates pairs of adjacent dims, with norms that round once."""

import dataclasses
import functools
from typing import ClassVar

from flax import nnx

from jaxtrain.huggingface.ops import ParameterEntry
from jaxtrain.layers.norm import PreciseRMSNorm, RMSNorm
from jaxtrain.models.blocks import attention_block, dense_mlp
from jaxtrain.models.decoder import Decoder, DecoderOptions
from jaxtrain.models.decoder_config import DecoderConfig
from jaxtrain.models.naming import decoder_names


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    architecture: ClassVar[str] = "HeliumForCausalLM"
    model_type: ClassVar[str] = "helium"
    norm: ClassVar[type[RMSNorm]] = PreciseRMSNorm

    attention_bias: bool = False
    """On queries, keys and values."""
    mlp_bias: bool = False


class Model(Decoder):
    def make_block(self, kind: str, config: Config, options: DecoderOptions, rngs: nnx.Rngs):
        make_mlp = functools.partial(dense_mlp, use_bias=config.mlp_bias)
        bias = config.attention_bias
        return attention_block(
            config, options, rngs, qkv_bias=bias, adjacent=True, make_mlp=make_mlp
        )


def names(config: Config) -> list[ParameterEntry]:
    """Every parameter and the tensors of a Hugging Face folder that it is made of."""
    return decoder_names(config, qkv_bias=config.attention_bias, mlp_bias=config.mlp_bias)
