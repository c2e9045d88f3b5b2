"""Mellum 2 (JetBrains 2026): Qwen3-MoE whose layers with a window have a position encoding of their
own."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from jaxtrain.layers.mixer import LayerSpec
from jaxtrain.layers.router import RoutingOptions
from jaxtrain.models.blocks import AttentionSpec, BlockSpec, ExpertsSpec, SpecDecoder, spec_names
from jaxtrain.models.experts import ExpertsConfig, list_experts
from jaxtrain.models.windows import FULL, SLIDING, windowed_layers

MTP_KEYS = ("num_mtp_layers", "mtp_layer_types", "mtp_mlp_layer_types")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(ExpertsConfig):
    architecture: ClassVar[str] = "MellumForCausalLM"
    model_type: ClassVar[str] = "mellum"
    newer: ClassVar[bool] = True
    rope_by_kind: ClassVar[bool] = True
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = dict.fromkeys(MTP_KEYS, ())
    """Attributes of layers that predict further tokens, which are carried along."""
    carries: ClassVar[tuple[str, ...]] = ("mtp.", "model.mtp.")
    goes_stale: ClassVar[tuple[str, ...]] = carries

    moe_intermediate_size: int
    """F of an expert; intermediate_size is that of a dense layer."""
    norm_topk_prob: bool
    """True if the gates of a token sum to 1."""
    num_nextn_predict_layers: int | None = None
    """Number of the layers that predict further tokens."""
    attention_bias: bool = False
    """On all four projections."""
    sliding_window: int | None = None
    layer_types: tuple[str, ...]
    mlp_layer_types: tuple[str, ...]

    def layers(self) -> tuple[LayerSpec, ...]:
        kinds = (SLIDING, FULL)
        windows = windowed_layers(
            self.num_hidden_layers, self.layer_types, self.sliding_window, kinds
        )
        return list_experts(windows, self.mlp_layer_types)

    @property
    def routing(self) -> RoutingOptions:
        return RoutingOptions(top=self.num_experts_per_tok, normalize=self.norm_topk_prob)

    @property
    def experts_spec(self) -> ExpertsSpec:
        return ExpertsSpec(hidden=self.moe_intermediate_size)

    def block_spec(self, kind: str) -> BlockSpec:
        bias = self.attention_bias
        return BlockSpec(
            AttentionSpec(qkv_bias=bias, out_bias=bias, qk_norm="head"), self.mlp_spec(kind)
        )


Model, names = SpecDecoder, spec_names
