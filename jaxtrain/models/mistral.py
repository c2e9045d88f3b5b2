"""Mistral dense (Jiang et al. 2023, arXiv:2310.06825): Llama's network, no biases, and where
`sliding_window` is set, each layer sees only that many tokens back.

Folders of Mistral Small 3.1 and later are multimodal; their vision tower is carried along."""

import dataclasses
from typing import ClassVar

from jaxtrain.layers.mixer import LayerSpec
from jaxtrain.models.blocks import BlockSpec, SpecDecoder, spec_names
from jaxtrain.models.multimodal import TextConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class PixtralConfig(TextConfig):
    """A text that may stand beside the vision tower of Mistral AI's folders."""

    also: ClassVar[tuple[str, ...]] = ("Mistral3ForConditionalGeneration",)
    model_type: ClassVar[str] = "mistral3"
    carries: ClassVar[tuple[str, ...]] = (
        *("vision_tower.", "multi_modal_projector."),
        *("model.vision_tower.", "model.multi_modal_projector."),
    )
    prefixes: ClassVar[tuple[str, ...]] = (
        *("language_model.model.", "model.language_model.", "model."),
    )
    media: ClassVar[tuple[str, ...]] = ("image_token_index", "image_token_id")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(PixtralConfig):
    architecture: ClassVar[str] = "MistralForCausalLM"
    text_type: ClassVar[str] = "mistral"

    sliding_window: int | None = None

    def layers(self) -> tuple[LayerSpec, ...]:
        return (LayerSpec(window=self.sliding_window),) * self.num_hidden_layers

    def block_spec(self, kind: str) -> BlockSpec:
        return BlockSpec()


Model, names = SpecDecoder, spec_names
