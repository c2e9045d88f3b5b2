"""SmolLM3 (Hugging Face 2025): Llama whose every fourth layer rotates nothing."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from jaxtrain.errors import UserError
from jaxtrain.layers.mixer import LayerSpec
from jaxtrain.models import llama
from jaxtrain.models.windows import windowed_layers

Model, names = llama.Model, llama.names


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(llama.Config):
    architecture: ClassVar[str] = "SmolLM3ForCausalLM"
    model_type: ClassVar[str] = "smollm3"
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {"max_window_layers": ()}

    no_rope_layers: tuple[int, ...]
    """0 for a layer without position encoding."""
    no_rope_layer_interval: int = 4
    """What `no_rope_layers` was made of."""
    use_sliding_window: bool = False
    sliding_window: int | None = None
    layer_types: tuple[str, ...] | None = None

    def check(self) -> None:
        if len(self.no_rope_layers) < self.num_hidden_layers:
            raise UserError(
                f"config.json: no_rope_layers has {len(self.no_rope_layers)} entries for"
                f" num_hidden_layers={self.num_hidden_layers}"
            )
        super().check()

    def layers(self) -> tuple[LayerSpec, ...]:
        window = self.sliding_window if self.use_sliding_window else None
        specs = windowed_layers(self.num_hidden_layers, self.layer_types, window)
        return tuple(
            spec if rotates else dataclasses.replace(spec, rope="none")
            for spec, rotates in zip(specs, self.no_rope_layers, strict=False)
        )
