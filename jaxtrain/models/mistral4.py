"""Mistral Small 4 (Mistral AI 2026): latent attention with queries that grow with their position,
and experts chosen by a softmax.

Folders of the Hub are multimodal; the vision tower and its projector are carried along."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from flax import nnx

from jaxtrain.errors import UserError
from jaxtrain.huggingface.ops import ParameterEntry
from jaxtrain.layers.rope import PositionScale, frequencies
from jaxtrain.layers.router import RoutingOptions
from jaxtrain.models.decoder import Decoder, DecoderOptions
from jaxtrain.models.latent import (
    LatentConfig,
    PairedLatentConfig,
    latent_attention_names,
    make_latent_block,
)
from jaxtrain.models.mistral import PixtralConfig
from jaxtrain.models.naming import (
    EXPERT_PARTS,
    fused_expert_names,
    linear_entries,
    mlp_names,
    norm_names,
    outer_names,
    with_prefix,
)


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


class Model(Decoder):
    def make_block(self, kind: str, config: Config, options: DecoderOptions, rngs: nnx.Rngs):
        return make_latent_block(kind, config, options, rngs)


def names(config: Config) -> list[ParameterEntry]:
    """Every parameter and the tensors of a Hugging Face folder that it is made of."""
    entries = outer_names(config)
    for kind, layers in config.layers_by_kind().items():
        entries += norm_names(kind, layers) + latent_attention_names(config, kind, layers)
        if kind == "dense":
            entries += mlp_names(kind, layers)
            continue
        entries += fused_expert_names(kind, layers, config.moe_intermediate_size)
        for part, projection in EXPERT_PARTS.items() if config.shared_width else ():
            names = f"mlp.shared.{part}", f"mlp.shared_experts.{projection}"
            entries += linear_entries(kind, layers, *names)
    return with_prefix(entries, config.prefix)
