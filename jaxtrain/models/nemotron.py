"""Nemotron-4 and Minitron (Parmar et al. 2024, arXiv:2402.16819): AFM's network with LayerNorm
around a scale of 1, half of each head rotated."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from jaxtrain.layers.norm import RMSNorm, ZeroCenteredLayerNorm
from jaxtrain.models import arcee

Model, names = arcee.Model, arcee.names


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(arcee.Config):
    architecture: ClassVar[str] = "NemotronForCausalLM"
    model_type: ClassVar[str] = "nemotron"
    renamed: ClassVar[Mapping[str, str]] = {"rms_norm_eps": "norm_eps"}
    rope_keys: ClassVar[tuple[str, ...]] = ("partial_rotary_factor",)
    norm: ClassVar[type[RMSNorm]] = ZeroCenteredLayerNorm
