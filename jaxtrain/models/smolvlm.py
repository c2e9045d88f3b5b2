"""SmolVLM (Marafioti et al. 2025, arXiv:2504.05299): Idefics3 in small."""

import dataclasses
from typing import ClassVar

from jaxtrain.models import idefics3
from jaxtrain.models.vision import TileConfig

Model, names = idefics3.Model, idefics3.names


class TowerConfig(TileConfig):
    model_type: ClassVar[str] = "smolvlm_vision"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(idefics3.Config):
    architecture: ClassVar[str] = "SmolVLMForConditionalGeneration"
    model_type: ClassVar[str] = "smolvlm"
    tower_type: ClassVar[type[TileConfig]] = TowerConfig
