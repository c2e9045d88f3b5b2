"""GLM-4.5, 4.6 and 4.7 (Zeng et al. 2025, arXiv:2508.06471): DeepSeek-V3's experts behind grouped
attention, half of whose dims are rotated."""

import dataclasses
from typing import ClassVar

from flax import nnx

from jaxtrain.huggingface.ops import ParameterEntry
from jaxtrain.models.blocks import attention_block, dense_mlp, grouped_experts_mlp
from jaxtrain.models.decoder import Decoder, DecoderOptions
from jaxtrain.models.experts import GroupedExpertsConfig
from jaxtrain.models.mtp_form import MTPForm, layer_form
from jaxtrain.models.naming import attention_names, grouped_expert_names, mlp_names, outer_names


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


class Model(Decoder):
    def make_block(self, kind: str, config: Config, options: DecoderOptions, rngs: nnx.Rngs):
        return attention_block(
            config,
            options,
            rngs,
            qkv_bias=config.attention_bias,
            qk_norm="head" if config.use_qk_norm else None,
            make_mlp=dense_mlp if kind == "dense" else grouped_experts_mlp,
        )


def names(config: Config) -> list[ParameterEntry]:
    """Every parameter and the tensors of a Hugging Face folder that it is made of."""
    entries = outer_names(config)
    for kind, layers in config.layers_by_kind().items():
        bias, qk_norm = config.attention_bias, config.use_qk_norm
        entries += attention_names(kind, layers, qkv_bias=bias, qk_norm=qk_norm)
        if kind == "dense":
            entries += mlp_names(kind, layers)
        else:
            entries += grouped_expert_names(kind, layers, config)
    return entries
