"""Ministral 3 (Mistral AI 2025): Mistral with YaRN, and queries that grow with their position."""

import dataclasses
from typing import ClassVar

from flax import nnx

from jaxtrain.layers.rope import PositionScale
from jaxtrain.models import mistral
from jaxtrain.models.blocks import attention_block
from jaxtrain.models.decoder import Decoder, DecoderOptions

names = mistral.names


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(mistral.Config):
    architecture: ClassVar[str] = "Ministral3ForCausalLM"
    text_type: ClassVar[str] = "ministral3"
    rope_keys: ClassVar[tuple[str, ...]] = ("llama_4_scaling_beta", "max_position_embeddings")
    """The second says again what max_position_embeddings does."""


class Model(Decoder):
    def make_block(self, kind: str, config: Config, options: DecoderOptions, rngs: nnx.Rngs):
        scale = PositionScale.from_rope(dict(config.rope))
        return attention_block(config, options, rngs, position_scale=scale)
