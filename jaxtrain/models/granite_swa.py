"""Granite with sliding windows (IBM 2026): Granite 3 with a window in three of four layers, sinks,
and a rotation base for each layer."""

import dataclasses
from typing import ClassVar

import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.layers.mixer import LayerSpec
from jaxtrain.layers.rope import frequencies
from jaxtrain.models import granite
from jaxtrain.models.blocks import SpecDecoder, spec_names
from jaxtrain.models.windows import windowed_layers


@dataclasses.dataclass(frozen=True, kw_only=True)
class WindowedGraniteConfig(granite.GraniteConfig):
    """A GraniteConfig with windows and a rotation base for each layer."""

    sinks: ClassVar[bool] = True

    sliding_window: int | None = None
    layer_types: tuple[str, ...]
    layer_rope_theta: tuple[float, ...]
    """Base of each layer's rotation; 0: the layer rotates nothing."""

    def check(self) -> None:
        if len(self.layer_rope_theta) != self.num_hidden_layers:
            raise UserError(
                f"config.json: layer_rope_theta has {len(self.layer_rope_theta)} entries for"
                f" num_hidden_layers={self.num_hidden_layers}"
            )
        wrong = [theta for theta in self.layer_rope_theta if theta != 0 and not 1 < theta <= 1e15]
        if wrong:
            raise UserError(
                f"config.json: layer_rope_theta holds {wrong[0]}; an entry must be above 1, or 0"
                " for a layer that rotates nothing"
            )
        super().check()

    def layers(self) -> tuple[LayerSpec, ...]:
        specs = windowed_layers(self.num_hidden_layers, self.layer_types, self.sliding_window)
        return tuple(
            dataclasses.replace(spec, rope=str(theta) if theta else "none")
            for spec, theta in zip(specs, self.layer_rope_theta, strict=True)
        )

    def encodings(self) -> dict[str, tuple[np.ndarray, float]]:
        lengths = self.max_position_embeddings, self.row_tokens
        return {
            str(theta): frequencies(
                self.head_size, {**dict(self.rope), "rope_theta": theta}, (), *lengths
            )
            for theta in sorted({*self.layer_rope_theta} - {0})
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(WindowedGraniteConfig, granite.Config):
    architecture: ClassVar[str] = "GraniteSWAForCausalLM"
    model_type: ClassVar[str] = "granite_swa"


Model, names = SpecDecoder, spec_names
