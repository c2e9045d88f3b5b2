"""Ministral 8B of 2024 (Mistral AI): Mistral's network, whose layers may differ in their window."""

import dataclasses
from typing import ClassVar

from jaxtrain.layers.mixer import LayerSpec
from jaxtrain.models.blocks import BlockSpec, SpecDecoder, spec_names
from jaxtrain.models.decoder_config import DecoderConfig
from jaxtrain.models.windows import windowed_layers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    architecture: ClassVar[str] = "MinistralForCausalLM"
    model_type: ClassVar[str] = "ministral"

    sliding_window: int | None = None
    layer_types: tuple[str, ...]

    def layers(self) -> tuple[LayerSpec, ...]:
        return windowed_layers(self.num_hidden_layers, self.layer_types, self.sliding_window)

    def block_spec(self, kind: str) -> BlockSpec:
        return BlockSpec()


Model, names = SpecDecoder, spec_names
