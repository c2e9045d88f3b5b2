"""Hunyuan 3 (Tencent 2026): experts chosen by sigmoids beside a shared one, behind attention whose
queries and keys are normed."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from jaxtrain.layers.mixer import LayerSpec
from jaxtrain.layers.router import RoutingOptions
from jaxtrain.models.blocks import AttentionSpec, BlockSpec, ExpertsSpec, SpecDecoder, spec_names
from jaxtrain.models.experts import ExpertsConfig, list_experts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(ExpertsConfig):
    architecture: ClassVar[str] = "HYV3ForCausalLM"
    model_type: ClassVar[str] = "hy_v3"
    renamed: ClassVar[Mapping[str, str]] = {"num_local_experts": "num_experts"}
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {"enable_moe_fp32_combine": ()}
    """Decides only where sums are rounded."""

    moe_intermediate_size: int
    """F of an expert; intermediate_size is that of a dense layer."""
    num_shared_experts: int
    """Experts that every token goes through: one MLP of so many times F."""
    router_scaling_factor: float
    """Factor of gates, which sum to 1 before."""
    mlp_layer_types: tuple[str, ...]
    attention_bias: bool = False
    """On all four projections."""

    def layers(self) -> tuple[LayerSpec, ...]:
        return list_experts(super().layers(), self.mlp_layer_types)

    @property
    def routing(self) -> RoutingOptions:
        top, scale = self.num_experts_per_tok, self.router_scaling_factor
        return RoutingOptions(top=top, score="sigmoid", normalize=True, scale=scale)

    @property
    def experts_spec(self) -> ExpertsSpec:
        return ExpertsSpec(
            hidden=self.moe_intermediate_size,
            num_shared=self.moe_intermediate_size * self.num_shared_experts,
            shared_name="shared_mlp",
            router="router.gate",
            choice_bias="expert_bias",
            wide=True,
        )

    def block_spec(self, kind: str) -> BlockSpec:
        bias = self.attention_bias
        return BlockSpec(
            AttentionSpec(qkv_bias=bias, out_bias=bias, qk_norm="head"), self.mlp_spec(kind)
        )


Model, names = SpecDecoder, spec_names
