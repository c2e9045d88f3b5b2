"""Qwen3-Next (Qwen Team 2025): linear and gated full attention with experts in all layers, or with
some dense ones between."""

import dataclasses
from typing import ClassVar

from jaxtrain.errors import UserError
from jaxtrain.layers.router import RoutingOptions
from jaxtrain.models.blocks import BlockSpec, DenseSpec, SpecDecoder, spec_names
from jaxtrain.models.hybrid import DeltaSpec, JointDeltaSpec
from jaxtrain.models.hybrid_experts import HybridExpertsConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(HybridExpertsConfig):
    architecture: ClassVar[str] = "Qwen3NextForCausalLM"
    model_type: ClassVar[str] = "qwen3_next"
    text_type: ClassVar[str] = "qwen3_next"
    linear_spec: ClassVar[DeltaSpec] = JointDeltaSpec()

    norm_topk_prob: bool = True
    """Whether the gates of a token sum to 1."""
    decoder_sparse_step: int = 1
    """Every so many-th layer has experts."""
    mlp_only_layers: tuple[int, ...] = ()
    """Layers that are dense nevertheless."""

    def check(self) -> None:
        if self.decoder_sparse_step < 1:
            raise UserError(
                f"config.json: decoder_sparse_step={self.decoder_sparse_step} must be at least 1"
            )
        super().check()

    def kind(self, layer: int) -> str:
        sparse = (layer + 1) % self.decoder_sparse_step == 0
        dense = not sparse or layer in self.mlp_only_layers
        mixing = super().kind(layer)
        return f"dense_{mixing}" if dense else mixing

    @property
    def routing(self) -> RoutingOptions:
        return RoutingOptions(top=self.num_experts_per_tok, normalize=self.norm_topk_prob)

    def block_spec(self, kind: str) -> BlockSpec:
        spec = super().block_spec(kind)
        return dataclasses.replace(spec, mlp=DenseSpec()) if kind.startswith("dense_") else spec


Model, names = SpecDecoder, spec_names
