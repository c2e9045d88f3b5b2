"""Qwen3-MoE (Yang et al. 2025, arXiv:2505.09388): Qwen3 with experts in the place of the MLP in
all layers, or with some dense ones between."""

import dataclasses
from typing import Any, ClassVar

from jaxtrain.layers.mixer import LayerSpec
from jaxtrain.models.blocks import AttentionSpec, BlockSpec, SpecDecoder, spec_names
from jaxtrain.models.experts import SparseStepConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(SparseStepConfig):
    architecture: ClassVar[str] = "Qwen3MoeForCausalLM"
    model_type: ClassVar[str] = "qwen3_moe"

    attention_bias: bool = False
    """On all four projections."""
    use_sliding_window: bool = False
    sliding_window: int | None = None
    """Of all layers, where use_sliding_window is true."""
    max_window_layers: int | None = None
    """Without effect in this family; carried along."""

    def layers(self) -> tuple[LayerSpec, ...]:
        numbers = range(self.num_hidden_layers)
        return tuple(LayerSpec(self.kind(layer), window=self.sliding_window) for layer in numbers)

    def to_hf(self) -> dict[str, Any]:
        """With the number's name in transformers 4, too."""
        return super().to_hf() | {"num_experts": self.num_local_experts}

    def block_spec(self, kind: str) -> BlockSpec:
        bias = self.attention_bias
        return BlockSpec(
            AttentionSpec(qkv_bias=bias, out_bias=bias, qk_norm="head"), self.mlp_spec(kind)
        )


Model, names = SpecDecoder, spec_names
