"""GLM-4-9B of 2024 (Zhipu, arXiv:2406.12793): half of each head rotated in pairs of adjacent dims,
gate and up in one matrix."""

import dataclasses
from typing import ClassVar

from jaxtrain.models import glm4
from jaxtrain.models.blocks import BlockSpec, SpecDecoder, spec_names
from jaxtrain.models.naming import PRE_NORMS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(glm4.Config):
    architecture: ClassVar[str] = "GlmForCausalLM"
    model_type: ClassVar[str] = "glm"

    def block_spec(self, kind: str) -> BlockSpec:
        return dataclasses.replace(super().block_spec(kind), norms=PRE_NORMS)


Model, names = SpecDecoder, spec_names
