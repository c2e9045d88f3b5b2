"""Flint: experts chosen by sigmoids beside a shared one, behind attention with sinks and normed
queries and keys; only layers with a window are rotated."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from jaxtrain.layers.mixer import LayerSpec
from jaxtrain.layers.norm import PreciseRMSNorm, RMSNorm
from jaxtrain.layers.router import RoutingOptions
from jaxtrain.models.blocks import AttentionSpec, BlockSpec, ExpertsSpec, SpecDecoder, spec_names
from jaxtrain.models.experts import SparseStepConfig
from jaxtrain.models.windows import unrotated, windowed_layers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(SparseStepConfig):
    architecture: ClassVar[str] = "FlintForCausalLM"
    model_type: ClassVar[str] = "flint"
    renamed: ClassVar[Mapping[str, str]] = {"num_local_experts": "num_experts"}
    norm: ClassVar[type[RMSNorm]] = PreciseRMSNorm

    shared_expert_intermediate_size: int
    """F of the shared expert."""
    attention_bias: bool = False
    """On all four projections."""
    sliding_window: int
    layer_types: tuple[str, ...]

    def layers(self) -> tuple[LayerSpec, ...]:
        windows = windowed_layers(self.num_hidden_layers, self.layer_types, self.sliding_window)
        return tuple(
            dataclasses.replace(spec, kind=self.kind(layer))
            for layer, spec in enumerate(unrotated(windows))
        )

    @property
    def routing(self) -> RoutingOptions:
        top, normalize = self.num_experts_per_tok, self.norm_topk_prob
        return RoutingOptions(top=top, score="sigmoid", normalize=normalize)

    @property
    def experts_spec(self) -> ExpertsSpec:
        return ExpertsSpec(
            hidden=self.moe_intermediate_size,
            num_shared=self.shared_expert_intermediate_size,
            shared_name="shared_expert",
            wide=True,
        )

    def block_spec(self, kind: str) -> BlockSpec:
        bias = self.attention_bias
        attention = AttentionSpec(
            qkv_bias=bias, out_bias=bias, qk_norm="head", sinks=True, sinks_name="softmax_offset"
        )
        return BlockSpec(attention, self.mlp_spec(kind))


Model, names = SpecDecoder, spec_names
