"""Ministral 3 (Mistral AI 2025): Mistral with YaRN, and queries that grow with their position."""

import dataclasses
from typing import ClassVar

from jaxtrain.layers.rope import PositionScale
from jaxtrain.models import mistral
from jaxtrain.models.blocks import AttentionSpec, BlockSpec, SpecDecoder, spec_names


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(mistral.Config):
    architecture: ClassVar[str] = "Ministral3ForCausalLM"
    text_type: ClassVar[str] = "ministral3"
    rope_keys: ClassVar[tuple[str, ...]] = ("llama_4_scaling_beta", "max_position_embeddings")
    """The second says again what max_position_embeddings does."""

    def block_spec(self, kind: str) -> BlockSpec:
        return BlockSpec(AttentionSpec(position_scale=PositionScale.from_rope(dict(self.rope))))


Model, names = SpecDecoder, spec_names
