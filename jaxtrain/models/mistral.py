"""Mistral dense (Jiang et al. 2023, arXiv:2310.06825): Llama's network, no biases, and where
`sliding_window` is set, each layer sees only that many tokens back."""

import dataclasses
from typing import ClassVar

from flax import nnx

from jaxtrain.hf.ops import Entry
from jaxtrain.layers.mixer import LayerSpec
from jaxtrain.models.blocks import attention_block
from jaxtrain.models.decoder import Decoder, DecoderConfig, Options
from jaxtrain.models.naming import decoder_names


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    architecture: ClassVar[str] = "MistralForCausalLM"
    model_type: ClassVar[str] = "mistral"

    sliding_window: int | None = None

    def layers(self) -> tuple[LayerSpec, ...]:
        return (LayerSpec(window=self.sliding_window),) * self.num_hidden_layers


class Model(Decoder):
    def make_block(self, kind: str, config: Config, options: Options, rngs: nnx.Rngs):
        return attention_block(config, options, rngs)


def names(config: Config) -> list[Entry]:
    """Every parameter and the tensors of a Hugging Face folder that it is made of."""
    return decoder_names(config)
