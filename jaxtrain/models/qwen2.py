"""Qwen2 and Qwen2.5 (Yang et al. 2024, arXiv:2407.10671): biases on queries, keys and values."""

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
    architecture: ClassVar[str] = "Qwen2ForCausalLM"
    model_type: ClassVar[str] = "qwen2"

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
                qkv_bias=True,
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
    return decoder_names(config, qkv_bias=True)
