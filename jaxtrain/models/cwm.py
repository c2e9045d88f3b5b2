"""Code World Model (Meta 2025, arXiv:2510.02387): Llama with a sliding window in three of four
layers."""

import dataclasses
from typing import ClassVar

from jaxtrain.layers.mixer import LayerSpec
from jaxtrain.models import llama
from jaxtrain.models.decoder_config import DecoderConfig
from jaxtrain.models.windows import windowed_layers

Model, names = llama.Model, llama.names


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    architecture: ClassVar[str] = "CwmForCausalLM"
    model_type: ClassVar[str] = "cwm"

    attention_bias: ClassVar[bool] = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    layer_types: tuple[str, ...]

    def layers(self) -> tuple[LayerSpec, ...]:
        return windowed_layers(self.num_hidden_layers, self.layer_types, self.sliding_window)
