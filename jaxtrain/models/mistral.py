"""Mistral dense (Jiang et al. 2023, arXiv:2310.06825): Llama's network, no biases, and where
`sliding_window` is set, each layer sees only that many tokens back."""

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
    architecture: ClassVar[str] = "MistralForCausalLM"
    model_type: ClassVar[str] = "mistral"

    sliding_window: int | None = None

    def windows(self) -> tuple[int | None, ...]:
        return (self.sliding_window,) * self.num_hidden_layers


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
    return decoder_names(config)
