"""OLMo 3 (OLMo team 2025): OLMo 2 with a window in three of four layers; a scaling of positions for
long texts is in the others alone."""

import dataclasses
from typing import ClassVar

from jaxtrain.layers.mixer import LayerSpec
from jaxtrain.models import olmo2
from jaxtrain.models.windows import FULL, SLIDING, windowed_layers

Model, names = olmo2.Model, olmo2.names


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(olmo2.Config):
    architecture: ClassVar[str] = "Olmo3ForCausalLM"
    model_type: ClassVar[str] = "olmo3"
    rope_by_kind: ClassVar[bool] = True

    sliding_window: int | None = None
    layer_types: tuple[str, ...] | None = None

    def layers(self) -> tuple[LayerSpec, ...]:
        kinds = (SLIDING, FULL)
        return windowed_layers(self.num_hidden_layers, self.layer_types, self.sliding_window, kinds)
