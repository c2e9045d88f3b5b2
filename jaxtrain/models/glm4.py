"""GLM-4-0414 dense (Zhipu 2025): norms around attention and MLP, half of each head rotated in pairs
of adjacent dims."""

import dataclasses
from typing import ClassVar

from flax import nnx

from jaxtrain.huggingface.ops import ParameterEntry
from jaxtrain.models.blocks import attention_block
from jaxtrain.models.decoder import Decoder, DecoderOptions
from jaxtrain.models.decoder_config import DecoderConfig
from jaxtrain.models.naming import attention_names, joint_mlp_names, outer_names

NORMS = {
    "attention_norm": "input_layernorm",
    "attention_out_norm": "post_self_attn_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "mlp_out_norm": "post_mlp_layernorm",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    architecture: ClassVar[str] = "Glm4ForCausalLM"
    model_type: ClassVar[str] = "glm4"
    rope_keys: ClassVar[tuple[str, ...]] = ("partial_rotary_factor",)

    attention_bias: bool = True
    """On queries, keys and values."""


class Model(Decoder):
    def make_block(self, kind: str, config: Config, options: DecoderOptions, rngs: nnx.Rngs):
        bias = config.attention_bias
        return attention_block(config, options, rngs, qkv_bias=bias, adjacent=True, norms=NORMS)


def names(config: Config) -> list[ParameterEntry]:
    """Every parameter and the tensors of a Hugging Face folder that it is made of."""
    kind, layers = "block", range(config.num_hidden_layers)
    return [
        *outer_names(config),
        *attention_names(kind, layers, qkv_bias=config.attention_bias, norms=NORMS),
        *joint_mlp_names(kind, layers, config.intermediate_size),
    ]
