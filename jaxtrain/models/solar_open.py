"""Solar Open (Upstage 2025): DeepSeek-V3's experts in every layer, behind Llama's
attention."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from flax import nnx

from jaxtrain.huggingface.ops import ParameterEntry
from jaxtrain.models.blocks import attention_block, grouped_experts_mlp
from jaxtrain.models.decoder import Decoder, DecoderOptions
from jaxtrain.models.experts import GroupedExpertsConfig
from jaxtrain.models.naming import attention_names, grouped_expert_names, outer_names


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(GroupedExpertsConfig):
    architecture: ClassVar[str] = "SolarOpenForCausalLM"
    model_type: ClassVar[str] = "solar_open"
    rope_keys: ClassVar[tuple[str, ...]] = ("partial_rotary_factor",)
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **GroupedExpertsConfig.fixed,
        "first_k_dense_replace": (0,),
        "intermediate_size": (),
    }

    intermediate_size: int = 0
    """There is no dense layer."""
    attention_bias: bool = False
    """On queries, keys and values."""

    def to_hf(self) -> dict[str, Any]:
        fixed = dict(self.fixed_attributes)
        aliases = ("intermediate_size", "first_k_dense_replace")
        return {k: v for k, v in super().to_hf().items() if k not in aliases or k in fixed}


class Model(Decoder):
    def make_block(self, kind: str, config: Config, options: DecoderOptions, rngs: nnx.Rngs):
        bias = config.attention_bias
        return attention_block(config, options, rngs, qkv_bias=bias, make_mlp=grouped_experts_mlp)


def names(config: Config) -> list[ParameterEntry]:
    """Every parameter and the tensors of a Hugging Face folder that it is made of."""
    layers = range(config.num_hidden_layers)
    return [
        *outer_names(config),
        *attention_names("block", layers, qkv_bias=config.attention_bias),
        *grouped_expert_names("block", layers, config),
    ]
