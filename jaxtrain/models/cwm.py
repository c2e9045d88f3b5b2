"""Code World Model (Meta 2025, arXiv:2510.02387): Llama with a window in three of four layers."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from jaxtrain.models import ministral
from jaxtrain.models.blocks import BlockSpec, DenseSpec, SpecDecoder, spec_names


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(ministral.Config):
    architecture: ClassVar[str] = "CwmForCausalLM"
    model_type: ClassVar[str] = "cwm"
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {"attention_bias": (False,)}

    mlp_bias: bool = False

    def block_spec(self, kind: str) -> BlockSpec:
        return BlockSpec(mlp=DenseSpec(bias=self.mlp_bias))


Model, names = SpecDecoder, spec_names
