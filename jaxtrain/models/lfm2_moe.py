"""LFM2 with experts (Liquid AI 2025, arXiv:2511.23404): short convolutions, some attention between
them, and behind each an MLP or, but for the first layers, experts chosen by sigmoids."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from jaxtrain.layers.mixer import LayerSpec
from jaxtrain.layers.router import RoutingOptions
from jaxtrain.models import lfm2
from jaxtrain.models.blocks import ExpertsSpec, MLPSpec, SpecDecoder, spec_names
from jaxtrain.models.experts import ExpertsConfig
from jaxtrain.models.naming import NUMBERED_PARTS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(lfm2.ConvConfig, ExpertsConfig):
    architecture: ClassVar[str] = "Lfm2MoeForCausalLM"
    model_type: ClassVar[str] = "lfm2_moe"
    old_keys: ClassVar[Mapping[str, str]] = lfm2.OLD_TIE
    renamed: ClassVar[Mapping[str, str]] = {
        **lfm2.ConvConfig.renamed,
        "num_local_experts": "num_experts",
    }

    moe_intermediate_size: int
    """F of an expert; intermediate_size is that of a dense layer."""
    num_dense_layers: int
    """How many of the first layers are dense; those are stored as <kind>_dense."""
    norm_topk_prob: bool
    """Whether the gates of a token sum to 1 before they are scaled."""
    routed_scaling_factor: float
    use_expert_bias: bool
    """Whether a correction bias moves the choice."""

    def layers(self) -> tuple[LayerSpec, ...]:
        return tuple(
            LayerSpec(spec.kind + ("_dense" if layer < self.num_dense_layers else ""))
            for layer, spec in enumerate(super().layers())
        )

    @property
    def routing(self) -> RoutingOptions:
        return RoutingOptions(
            top=self.num_experts_per_tok,
            score="sigmoid",
            normalize=self.norm_topk_prob,
            eps=1e-6,
            scale=self.routed_scaling_factor,
        )

    @property
    def experts_spec(self) -> ExpertsSpec:
        return ExpertsSpec(
            hidden=self.moe_intermediate_size,
            module=lfm2.MODULE,
            parts=NUMBERED_PARTS,
            choice_bias="expert_bias" if self.use_expert_bias else None,
        )

    def mlp_spec(self, kind: str) -> MLPSpec:
        return super().mlp_spec(kind) if kind.endswith("_dense") else self.experts_spec


Model, names = SpecDecoder, spec_names
