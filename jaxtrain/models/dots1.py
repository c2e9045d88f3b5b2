"""dots.llm1 (rednote 2025, arXiv:2506.05767): DeepSeek-V3's experts behind Qwen3's
attention."""

import dataclasses
from typing import ClassVar

from jaxtrain.layers.mixer import LayerSpec
from jaxtrain.models.blocks import AttentionSpec, BlockSpec, SpecDecoder, spec_names
from jaxtrain.models.experts import GroupedExpertsConfig
from jaxtrain.models.windows import windowed_layers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(GroupedExpertsConfig):
    architecture: ClassVar[str] = "Dots1ForCausalLM"
    model_type: ClassVar[str] = "dots1"

    attention_bias: bool = False
    """On all four projections."""
    sliding_window: int | None = None
    max_window_layers: int | None = None
    layer_types: tuple[str, ...] | None = None
    """Which layers slide; transformers derives it from max_window_layers where it is absent."""

    def layers(self) -> tuple[LayerSpec, ...]:
        windows = windowed_layers(self.num_hidden_layers, self.layer_types, self.sliding_window)
        kinds = (spec.kind for spec in super().layers())
        return tuple(
            dataclasses.replace(spec, kind=kind) for spec, kind in zip(windows, kinds, strict=True)
        )

    def block_spec(self, kind: str) -> BlockSpec:
        bias = self.attention_bias
        return BlockSpec(
            AttentionSpec(qkv_bias=bias, out_bias=bias, qk_norm="head"), self.mlp_spec(kind)
        )


Model, names = SpecDecoder, spec_names
