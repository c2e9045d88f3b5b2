"""Llama 3.x (Grattafiori et al. 2024, arXiv:2407.21783), with its rope scaling."""

import dataclasses
from typing import ClassVar

from flax import nnx

from jaxtrain.hf.ops import Entry
from jaxtrain.layers.attention import Attention
from jaxtrain.layers.block import PreNormBlock
from jaxtrain.layers.mlp import GatedMLP
from jaxtrain.layers.norm import RMSNorm
from jaxtrain.models.decoder import Decoder, DecoderConfig, Options
from jaxtrain.models.naming import decoder_names


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    architecture: ClassVar[str] = "LlamaForCausalLM"
    model_type: ClassVar[str] = "llama"

    attention_bias: bool = False
    """On all four projections."""
    mlp_bias: bool = False


class Block(PreNormBlock):
    def __init__(self, config: Config, options: Options, rngs: nnx.Rngs):
        common = options.layer_options(config, rngs)
        width, eps = config.hidden_size, config.rms_norm_eps
        super().__init__(
            RMSNorm(width, eps=eps, param_dtype=common["param_dtype"]),
            Attention(
                width,
                config.num_attention_heads,
                config.num_key_value_heads,
                config.head_size,
                qkv_bias=config.attention_bias,
                out_bias=config.attention_bias,
                impl=options.attention_impl,
                **common,
            ),
            RMSNorm(width, eps=eps, param_dtype=common["param_dtype"]),
            GatedMLP(
                width,
                config.intermediate_size,
                activation=config.hidden_act,
                use_bias=config.mlp_bias,
                **common,
            ),
        )


class Model(Decoder):
    def __init__(self, config: Config, options: Options, rngs: nnx.Rngs):
        super().__init__(config, options, Block, rngs)


def names(config: Config) -> list[Entry]:
    """Every parameter and the tensors of a Hugging Face folder that it is made of."""
    bias = config.attention_bias
    return decoder_names(config, qkv_bias=bias, out_bias=bias, mlp_bias=config.mlp_bias)
