"""Mixtral (Jiang et al. 2024, arXiv:2401.04088): Mistral with experts in every layer; the gates of
a token are a softmax over its chosen experts."""

import dataclasses
from typing import ClassVar

from jaxtrain.layers.mixer import LayerSpec
from jaxtrain.models.blocks import AttentionSpec, BlockSpec, ExpertsSpec, SpecDecoder, spec_names
from jaxtrain.models.experts import ExpertsConfig
from jaxtrain.models.naming import NUMBERED_PARTS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(ExpertsConfig):
    architecture: ClassVar[str] = "MixtralForCausalLM"
    model_type: ClassVar[str] = "mixtral"

    sliding_window: int | None = None

    def layers(self) -> tuple[LayerSpec, ...]:
        return (LayerSpec(window=self.sliding_window),) * self.num_hidden_layers

    @property
    def experts_spec(self) -> ExpertsSpec:
        return ExpertsSpec(
            hidden=self.intermediate_size, module="block_sparse_moe", parts=NUMBERED_PARTS
        )

    def block_spec(self, kind: str) -> BlockSpec:
        return BlockSpec(AttentionSpec(), self.experts_spec)


Model, names = SpecDecoder, spec_names
