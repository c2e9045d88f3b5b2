"""Seed-OSS (ByteDance 2025): Llama with biases on queries, keys and values."""

import dataclasses
import functools
from typing import ClassVar

from flax import nnx

from jaxtrain.huggingface.ops import ParameterEntry
from jaxtrain.models.blocks import attention_block, dense_mlp
from jaxtrain.models.decoder import Decoder, DecoderOptions
from jaxtrain.models.decoder_config import DecoderConfig
from jaxtrain.models.naming import decoder_names


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    architecture: ClassVar[str] = "SeedOssForCausalLM"
    model_type: ClassVar[str] = "seed_oss"

    attention_bias: bool = True
    """On queries, keys and values."""
    attention_out_bias: bool = False
    mlp_bias: bool = False


class Model(Decoder):
    def make_block(self, kind: str, config: Config, options: DecoderOptions, rngs: nnx.Rngs):
        return attention_block(
            config,
            options,
            rngs,
            qkv_bias=config.attention_bias,
            out_bias=config.attention_out_bias,
            make_mlp=functools.partial(dense_mlp, use_bias=config.mlp_bias),
        )


def names(config: Config) -> list[ParameterEntry]:
    """Every parameter and the tensors of a Hugging Face folder that it is made of."""
    return decoder_names(
        config,
        qkv_bias=config.attention_bias,
        out_bias=config.attention_out_bias,
        mlp_bias=config.mlp_bias,
    )
