"""Jais 2 (Inception 2025): AFM's network with LayerNorm and biases everywhere."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from jaxtrain.layers.norm import LayerNorm, RMSNorm
from jaxtrain.models import arcee

Model, names = arcee.Model, arcee.names


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(arcee.Config):
    architecture: ClassVar[str] = "Jais2ForCausalLM"
    model_type: ClassVar[str] = "jais2"
    renamed: ClassVar[Mapping[str, str]] = {"rms_norm_eps": "layer_norm_eps"}
    norm: ClassVar[type[RMSNorm]] = LayerNorm
