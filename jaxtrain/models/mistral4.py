"""Mistral Small 4 (Mistral AI 2026): latent attention with queries that grow with their position,
and experts chosen by a softmax.

Folders of the Hub are multimodal; the vision tower and its projector are carried along."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.layers.rope import PositionScale, frequencies
from jaxtrain.layers.router import RoutingOptions
from jaxtrain.models.blocks import ExpertsSpec, SpecDecoder, spec_names
from jaxtrain.models.experts import FusedExpertsSpec
from jaxtrain.models.latent import LatentConfig, PairedLatentConfig
from jaxtrain.models.mistral import PixtralConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(PixtralConfig, PairedLatentConfig, LatentConfig):
    architecture: ClassVar[str] = "Mistral4ForCausalLM"
    text_type: ClassVar[str] = "mistral4"
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    rope_keys: ClassVar[tuple[str, ...]] = (
        *("llama_4_scaling_beta", "max_position_embeddings", "partial_rotary_factor"),
    )
    """The second says again what max_position_embeddings does, the third what qk_rope_head_dim."""
    wide_router: ClassVar[bool] = False
    goes_stale: ClassVar[tuple[str, ...]] = ()

    def check(self) -> None:
        share = dict(self.rope).get("partial_rotary_factor", 1.0)
        if round(share * self.head_size) not in (self.qk_rope_head_dim, self.head_size):
            raise UserError(
                f"config.json: partial_rotary_factor={share} of {self.head_size} dims of a head"
                f" says something else than qk_rope_head_dim={self.qk_rope_head_dim}"
            )
        super().check()

    def encodings(self) -> dict[str, tuple[np.ndarray, float]]:
        rope = {key: value for key, value in self.rope if key not in self.rope_keys}
        lengths = self.max_position_embeddings, self.row_tokens
        return {"default": frequencies(self.qk_rope_head_dim, rope, (), *lengths)}

    @property
    def position_scale(self) -> PositionScale | None:
        return PositionScale.from_rope(dict(self.rope))

    @property
    def routing(self) -> RoutingOptions:
        return dataclasses.replace(super().routing, score="softmax")

    @property
    def experts_spec(self) -> ExpertsSpec:
        return FusedExpertsSpec(hidden=self.moe_intermediate_size, num_shared=self.shared_width)


Model, names = SpecDecoder, spec_names
