"""OLMoE (Muennighoff et al. 2024, arXiv:2409.02060): experts in every layer; queries and keys are
normed over all heads, then clipped."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar

from flax import nnx

from jaxtrain.huggingface.ops import ParameterEntry
from jaxtrain.layers.block import Block
from jaxtrain.layers.router import RoutingOptions
from jaxtrain.models.blocks import attention_block, experts_mlp
from jaxtrain.models.decoder import Decoder, DecoderOptions
from jaxtrain.models.experts import ExpertsConfig
from jaxtrain.models.naming import PRE_NORMS, attention_names, expert_names, outer_names


@dataclasses.dataclass(frozen=True, kw_only=True)
class OlmoExpertsConfig(ExpertsConfig):
    """An ExpertsConfig with experts of `intermediate_size` in every layer."""

    renamed: ClassVar[Mapping[str, str]] = {"num_local_experts": "num_experts"}

    norm_topk_prob: bool = False
    """True if the gates of a token sum to 1."""
    attention_bias: bool = False
    """On all four projections."""

    @property
    def routing(self) -> RoutingOptions:
        return RoutingOptions(top=self.num_experts_per_tok, normalize=self.norm_topk_prob)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(OlmoExpertsConfig):
    architecture: ClassVar[str] = "OlmoeForCausalLM"
    model_type: ClassVar[str] = "olmoe"

    clip_qkv: float | None = None
    """Queries, keys and values beyond it, either way, become it."""


def make_expert_block(
    config: OlmoExpertsConfig, options: DecoderOptions, rngs: nnx.Rngs, **choices: Any
) -> Block:
    """Build a block of attention, whose queries and keys are normed over all heads, and of experts;
    choices: further options of `attention_block`."""
    return attention_block(
        config,
        options,
        rngs,
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
        qk_norm="all_heads",
        make_mlp=functools.partial(experts_mlp, num_hidden=config.intermediate_size),
        **choices,
    )


class Model(Decoder):
    def make_block(self, kind: str, config: Config, options: DecoderOptions, rngs: nnx.Rngs):
        return make_expert_block(config, options, rngs, clip=config.clip_qkv)


def names(config: OlmoExpertsConfig, norms: Mapping[str, str] = PRE_NORMS) -> list[ParameterEntry]:
    """Every parameter and the tensors of a Hugging Face folder that it is made of; norms: those of
    a block and what they are called there."""
    layers, bias = range(config.num_hidden_layers), config.attention_bias
    biases = {"qkv_bias": bias, "out_bias": bias}
    return [
        *outer_names(config),
        *attention_names("block", layers, qk_norm=True, norms=norms, **biases),
        *expert_names("block", layers, config.num_local_experts),
    ]
