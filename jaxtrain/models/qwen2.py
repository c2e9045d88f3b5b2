"""Qwen2 and Qwen2.5 (Yang et al. 2024, arXiv:2407.10671): biases on queries, keys and values."""

import dataclasses
from typing import ClassVar

from jaxtrain.layers.mixer import LayerSpec
from jaxtrain.models.blocks import AttentionSpec, BlockSpec, SpecDecoder, spec_names
from jaxtrain.models.decoder_config import DecoderConfig
from jaxtrain.models.windows import windowed_layers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    architecture: ClassVar[str] = "Qwen2ForCausalLM"
    model_type: ClassVar[str] = "qwen2"

    use_sliding_window: bool = False
    sliding_window: int | None = None
    max_window_layers: int = 0
    layer_types: tuple[str, ...] | None = None
    """Which layers slide; transformers derives it from max_window_layers where it is absent."""

    def layers(self) -> tuple[LayerSpec, ...]:
        return windowed_layers(self.num_hidden_layers, self.layer_types, self.sliding_window)

    def block_spec(self, kind: str) -> BlockSpec:
        return BlockSpec(AttentionSpec(qkv_bias=True))


Model, names = SpecDecoder, spec_names
