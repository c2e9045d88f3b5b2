"""Ministral 8B of 2024 (Mistral AI): Mistral's network, whose layers may differ in their window."""

import dataclasses
from typing import ClassVar

from jaxtrain.huggingface.ops import ParameterEntry
from jaxtrain.layers.mixer import LayerSpec
from jaxtrain.models import mistral
from jaxtrain.models.decoder_config import DecoderConfig
from jaxtrain.models.naming import decoder_names
from jaxtrain.models.windows import windowed_layers

Model = mistral.Model


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    architecture: ClassVar[str] = "MinistralForCausalLM"
    model_type: ClassVar[str] = "ministral"

    sliding_window: int | None = None
    layer_types: tuple[str, ...]

    def layers(self) -> tuple[LayerSpec, ...]:
        return windowed_layers(self.num_hidden_layers, self.layer_types, self.sliding_window)


def names(config: Config) -> list[ParameterEntry]:
    """Every parameter and the tensors of a Hugging Face folder that it is made of."""
    return decoder_names(config)
