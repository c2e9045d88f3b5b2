"""Qwen3 dense (Yang et al. 2025, arXiv:2505.09388): RMSNorm on queries and keys, no biases."""

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
from jaxtrain.models.windows import layer_windows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    architecture: ClassVar[str] = "Qwen3ForCausalLM"
    model_type: ClassVar[str] = "qwen3"

    attention_bias: bool = False
    """On all four projections."""
    use_sliding_window: bool = False
    sliding_window: int | None = None
    max_window_layers: int = 0
    layer_types: tuple[str, ...] | None = None
    """Which layers slide; transformers derives it from max_window_layers where it is absent."""

    def windows(self) -> tuple[int | None, ...]:
        return layer_windows(self.num_hidden_layers, self.layer_types, self.sliding_window)


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
                qk_norm_eps=eps,
                impl=options.attention_impl,
                **common,
            ),
            RMSNorm(width, eps=eps, param_dtype=common["param_dtype"]),
            GatedMLP(width, config.intermediate_size, activation=config.hidden_act, **common),
        )


class Model(Decoder):
    def __init__(self, config: Config, options: Options, rngs: nnx.Rngs):
        super().__init__(config, options, Block, rngs)


def names(config: Config) -> list[Entry]:
    """Every parameter and the tensors of a Hugging Face folder that it is made of."""
    bias = config.attention_bias
    return decoder_names(config, qkv_bias=bias, out_bias=bias, qk_norm=True)
