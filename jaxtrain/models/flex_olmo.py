"""FlexOlmo (Shi et al. 2025, arXiv:2507.07024): OLMo 2 with OLMoE's experts in every layer."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import ClassVar

from flax import nnx

from jaxtrain.huggingface.ops import ParameterEntry
from jaxtrain.layers.norm import PreciseRMSNorm, RMSNorm
from jaxtrain.layers.router import RoutingOptions
from jaxtrain.models.blocks import attention_block, experts_mlp
from jaxtrain.models.decoder import Decoder, DecoderOptions
from jaxtrain.models.experts import ExpertsConfig
from jaxtrain.models.naming import POST_NORMS, attention_names, expert_names, outer_names


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(ExpertsConfig):
    architecture: ClassVar[str] = "FlexOlmoForCausalLM"
    model_type: ClassVar[str] = "flex_olmo"
    renamed: ClassVar[Mapping[str, str]] = {"num_local_experts": "num_experts"}
    norm: ClassVar[type[RMSNorm]] = PreciseRMSNorm

    norm_topk_prob: bool = False
    """Whether the gates of a token sum to 1."""
    attention_bias: bool = False
    """On all four projections."""

    @property
    def routing(self) -> RoutingOptions:
        return RoutingOptions(top=self.num_experts_per_tok, normalize=self.norm_topk_prob)


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
            make_mlp=functools.partial(experts_mlp, num_hidden=config.intermediate_size),
        )


def names(config: Config) -> list[ParameterEntry]:
    """Every parameter and the tensors of a Hugging Face folder that it is made of."""
    layers, bias = range(config.num_hidden_layers), config.attention_bias
    biases = {"qkv_bias": bias, "out_bias": bias}
    return [
        *outer_names(config),
        *attention_names("block", layers, qk_norm=True, norms=POST_NORMS, **biases),
        *expert_names("block", layers, config.num_local_experts),
    ]
