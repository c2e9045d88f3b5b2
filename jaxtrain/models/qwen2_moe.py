"""Qwen1.5-MoE and Qwen2-MoE (Yang et al. 2024, arXiv:2407.10671): Qwen2 with experts, and a shared
one of which a token takes its own share, in the place of the MLP."""

import dataclasses
from typing import ClassVar

from jaxtrain.layers.mixer import LayerSpec
from jaxtrain.models.blocks import AttentionSpec, BlockSpec, ExpertsSpec, SpecDecoder, spec_names
from jaxtrain.models.experts import SparseStepConfig
from jaxtrain.models.windows import windowed_layers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(SparseStepConfig):
    architecture: ClassVar[str] = "Qwen2MoeForCausalLM"
    model_type: ClassVar[str] = "qwen2_moe"
    renamed: ClassVar[dict[str, str]] = {"num_local_experts": "num_experts"}

    shared_expert_intermediate_size: int
    """F of the shared expert."""
    qkv_bias: bool = True
    use_sliding_window: bool = False
    sliding_window: int | None = None
    max_window_layers: int | None = None
    layer_types: tuple[str, ...] | None = None
    """Which layers slide; transformers derives it from max_window_layers where it is absent."""

    def layers(self) -> tuple[LayerSpec, ...]:
        windows = windowed_layers(self.num_hidden_layers, self.layer_types, self.sliding_window)
        return tuple(
            dataclasses.replace(spec, kind=self.kind(layer)) for layer, spec in enumerate(windows)
        )

    @property
    def experts_spec(self) -> ExpertsSpec:
        return ExpertsSpec(
            hidden=self.moe_intermediate_size,
            num_shared=self.shared_expert_intermediate_size,
            shared_name="shared_expert",
            gate_shared=True,
        )

    def block_spec(self, kind: str) -> BlockSpec:
        return BlockSpec(AttentionSpec(qkv_bias=self.qkv_bias), self.mlp_spec(kind))


Model, names = SpecDecoder, spec_names
