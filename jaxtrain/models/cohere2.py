"""Command R7B and Command A (Cohere 2024, arXiv:2504.00698): Command R with a sliding window in
three of four layers; the others rotate nothing."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from jaxtrain.layers.mixer import LayerSpec
from jaxtrain.models import cohere
from jaxtrain.models.windows import FULL, SLIDING, name_layers, unrotated, windowed_layers

Model, names = cohere.Model, cohere.names
PATTERNS = ("sliding_window_pattern", "_sliding_window_pattern")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(cohere.CohereConfig):
    architecture: ClassVar[str] = "Cohere2ForCausalLM"
    model_type: ClassVar[str] = "cohere2"
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "cache_implementation": ("hybrid",),
        "order_of_interleaved_layers": ("local_attn_first",),
        "position_embedding_type": ("rope_gptj",),
        "rotary_pct": (1,),
        "use_embedding_sharing": (True,),
        "use_gated_activation": (True,),
        "use_parallel_block": (True,),
        "use_parallel_embedding": (),
        "use_qk_norm": (False,),
        **dict.fromkeys(PATTERNS, ()),
    }

    sliding_window: int | None = None
    layer_types: tuple[str, ...]

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        raw = dict(raw)
        name_layers(raw, PATTERNS[:1], 4, (SLIDING, FULL))
        return super().from_hf(raw)

    def layers(self) -> tuple[LayerSpec, ...]:
        return unrotated(
            windowed_layers(self.num_hidden_layers, self.layer_types, self.sliding_window)
        )
