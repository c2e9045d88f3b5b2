"""Llama 3.x (Grattafiori et al. 2024, arXiv:2407.21783), with its rope scaling."""

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
    architecture: ClassVar[str] = "LlamaForCausalLM"
    model_type: ClassVar[str] = "llama"

    attention_bias: bool = False
    """On all four projections."""
    mlp_bias: bool = False


class Model(Decoder):
    def make_block(self, kind: str, config: Config, options: DecoderOptions, rngs: nnx.Rngs):
        bias = config.attention_bias
        make_mlp = functools.partial(dense_mlp, use_bias=config.mlp_bias)
        return attention_block(
            config, options, rngs, qkv_bias=bias, out_bias=bias, make_mlp=make_mlp
        )


def names(config: Config) -> list[ParameterEntry]:
    """Every parameter and the tensors of a Hugging Face folder that it is made of."""
    bias = config.attention_bias
    return decoder_names(config, qkv_bias=bias, out_bias=bias, mlp_bias=config.mlp_bias)
