"""GLM-4.5, 4.6 and 4.7 (Zeng et al. 2025, arXiv:2508.06471): DeepSeek-V3's experts behind grouped
attention, half of whose dims are rotated."""

import dataclasses
from typing import ClassVar

from jaxtrain.models.blocks import AttentionSpec, BlockSpec, SpecDecoder, spec_names
from jaxtrain.models.experts import GroupedExpertsConfig
from jaxtrain.models.mtp_form import MTPForm, layer_form


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(GroupedExpertsConfig):
    architecture: ClassVar[str] = "Glm4MoeForCausalLM"
    model_type: ClassVar[str] = "glm4_moe"
    rope_keys: ClassVar[tuple[str, ...]] = ("partial_rotary_factor",)

    attention_bias: bool = False
    """On queries, keys and values."""
    use_qk_norm: bool = False
    """A norm over each head's queries and keys."""

    @property
    def mtp_form(self) -> MTPForm:
        return layer_form(self.num_hidden_layers)

    def block_spec(self, kind: str) -> BlockSpec:
        norm = "head" if self.use_qk_norm else None
        return BlockSpec(
            AttentionSpec(qkv_bias=self.attention_bias, qk_norm=norm), self.mlp_spec(kind)
        )


Model, names = SpecDecoder, spec_names
