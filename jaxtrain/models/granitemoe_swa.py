"""Granite with experts and sliding windows (IBM 2026): Granite 3's experts, perhaps with an MLP
beside them, behind windows, sinks and a rotation base for each layer."""

import dataclasses
from typing import ClassVar

from jaxtrain.models import granitemoeshared
from jaxtrain.models.blocks import ExpertsSpec, SpecDecoder, spec_names
from jaxtrain.models.experts import FusedExpertsSpec
from jaxtrain.models.granite_swa import WindowedGraniteConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(granitemoeshared.Config, WindowedGraniteConfig):
    architecture: ClassVar[str] = "GraniteMoeSWAForCausalLM"
    model_type: ClassVar[str] = "granitemoe_swa"

    shared_intermediate_size: int = 0

    @property
    def experts_spec(self) -> ExpertsSpec:
        tensors = FusedExpertsSpec.tensors
        return dataclasses.replace(super().experts_spec, router="router", tensors=tensors)


Model, names = SpecDecoder, spec_names
