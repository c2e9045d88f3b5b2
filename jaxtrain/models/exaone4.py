"""EXAONE 4 (LG AI Research 2025, arXiv:2507.11407): norms behind attention and MLP and on queries
and keys; where layers have windows, those without one rotate nothing."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from jaxtrain.layers.mixer import LayerSpec
from jaxtrain.models.blocks import AttentionSpec, BlockSpec, SpecDecoder, spec_names
from jaxtrain.models.decoder_config import DecoderConfig
from jaxtrain.models.naming import POST_NORMS
from jaxtrain.models.windows import FULL, SLIDING, name_layers, unrotated, windowed_layers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    architecture: ClassVar[str] = "Exaone4ForCausalLM"
    model_type: ClassVar[str] = "exaone4"
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {"sliding_window_pattern": ()}
    """What layer_types was made of: a number, or letters."""

    sliding_window: int | None = None
    layer_types: tuple[str, ...] | None = None

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        raw = dict(raw)
        if raw.get("sliding_window", 0) is not None:
            name_layers(raw, ("sliding_window_pattern",), 4, (SLIDING, FULL))
        return super().from_hf(raw)

    def layers(self) -> tuple[LayerSpec, ...]:
        specs = windowed_layers(self.num_hidden_layers, self.layer_types, self.sliding_window)
        return specs if self.sliding_window is None else unrotated(specs)

    def block_spec(self, kind: str) -> BlockSpec:
        return BlockSpec(AttentionSpec(qk_norm="head"), norms=POST_NORMS)


Model, names = SpecDecoder, spec_names
