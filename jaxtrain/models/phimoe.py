"""Phi-3.5-MoE (Abdin et al. 2024, arXiv:2404.14219): Mixtral with LayerNorm, biases, also on the
head, and SparseMixer's gates, each a softmax over the experts that score nearly as high."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from jaxtrain.layers.norm import LayerNorm, RMSNorm
from jaxtrain.layers.router import RoutingOptions
from jaxtrain.models import mixtral
from jaxtrain.models.blocks import AttentionSpec, BlockSpec, SpecDecoder, spec_names


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(mixtral.Config):
    architecture: ClassVar[str] = "PhimoeForCausalLM"
    model_type: ClassVar[str] = "phimoe"
    rope_keys: ClassVar[tuple[str, ...]] = ("short_mscale", "long_mscale")
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {"original_max_position_embeddings": ()}
    norm: ClassVar[type[RMSNorm]] = LayerNorm

    attention_bias: bool = False
    """On all four projections."""
    lm_head_bias: bool = False
    router_jitter_noise: float = 0.01
    """Half the relative distance of logits within which experts share a gate."""

    @property
    def head_bias(self) -> bool:
        return self.lm_head_bias

    @property
    def routing(self) -> RoutingOptions:
        return RoutingOptions(top=self.num_experts_per_tok, near=2 * self.router_jitter_noise)

    def encodings(self) -> dict[str, tuple[np.ndarray, float]]:
        (frequencies, factor), rope = super().encodings()["default"], dict(self.rope)
        if rope.get("rope_type") == "longrope":
            tokens = self.row_tokens or self.max_position_embeddings
            long = tokens > rope["original_max_position_embeddings"]
            factor = float(rope["long_mscale" if long else "short_mscale"])
        return {"default": (frequencies, factor)}

    def block_spec(self, kind: str) -> BlockSpec:
        bias = self.attention_bias
        return BlockSpec(AttentionSpec(qkv_bias=bias, out_bias=bias), self.experts_spec)


Model, names = SpecDecoder, spec_names
