"""OLMoE (Muennighoff et al. 2024, arXiv:2409.02060): experts in every layer; queries and keys are
normed over all heads, then clipped."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from jaxtrain.layers.router import RoutingOptions
from jaxtrain.models.blocks import AttentionSpec, BlockSpec, ExpertsSpec, SpecDecoder, spec_names
from jaxtrain.models.experts import ExpertsConfig


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

    @property
    def experts_spec(self) -> ExpertsSpec:
        return ExpertsSpec(hidden=self.intermediate_size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(OlmoExpertsConfig):
    architecture: ClassVar[str] = "OlmoeForCausalLM"
    model_type: ClassVar[str] = "olmoe"

    clip_qkv: float | None = None
    """Queries, keys and values beyond it, either way, become it."""

    def block_spec(self, kind: str) -> BlockSpec:
        bias, clip = self.attention_bias, self.clip_qkv
        attention = AttentionSpec(qkv_bias=bias, out_bias=bias, qk_norm="all_heads", clip=clip)
        return BlockSpec(attention, self.experts_spec)


Model, names = SpecDecoder, spec_names
