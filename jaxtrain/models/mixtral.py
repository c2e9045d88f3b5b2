"""Mixtral (Jiang et al. 2024, arXiv:2401.04088): Mistral with experts in every layer; the gates of
a token are a softmax over its chosen experts."""

import dataclasses
from typing import ClassVar

from flax import nnx

from jaxtrain.hf.ops import Entry
from jaxtrain.layers.attention import Attention
from jaxtrain.layers.block import PreNormBlock
from jaxtrain.layers.moe import MoE
from jaxtrain.layers.norm import RMSNorm
from jaxtrain.layers.router import Router
from jaxtrain.models.decoder import Decoder, Options
from jaxtrain.models.experts import ExpertsConfig
from jaxtrain.models.naming import attention_names, expert_names, outer_names


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(ExpertsConfig):
    architecture: ClassVar[str] = "MixtralForCausalLM"
    model_type: ClassVar[str] = "mixtral"

    sliding_window: int | None = None

    def windows(self) -> tuple[int | None, ...]:
        return (self.sliding_window,) * self.num_hidden_layers


class Block(PreNormBlock):
    def __init__(self, config: Config, options: Options, rngs: nnx.Rngs):
        common = options.layer_options(config, rngs)
        width, eps = config.hidden_size, config.rms_norm_eps
        top, count = config.num_experts_per_tok, config.num_local_experts
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
            MoE(
                Router(width, count, top=top, normalise=True, **common),
                width,
                config.intermediate_size,
                count,
                activation=config.hidden_act,
                **common,
            ),
        )


class Model(Decoder):
    def __init__(self, config: Config, options: Options, rngs: nnx.Rngs):
        super().__init__(config, options, Block, rngs)


def names(config: Config) -> list[Entry]:
    """Every parameter and the tensors of a Hugging Face folder that it is made of."""
    layers = range(config.num_hidden_layers)
    return [
        *outer_names(config),
        *attention_names("block", layers),
        *expert_names(
            "block",
            layers,
            config.num_local_experts,
            module="block_sparse_moe",
            parts=("w1", "w3", "w2"),
        ),
    ]
