"""GLM-4-9B of 2024 (Zhipu, arXiv:2406.12793): half of each head rotated in pairs of adjacent dims,
gate and up in one matrix."""

import dataclasses
from typing import ClassVar

from flax import nnx

from jaxtrain.huggingface.ops import ParameterEntry
from jaxtrain.models import glm4
from jaxtrain.models.blocks import attention_block
from jaxtrain.models.decoder import Decoder, DecoderOptions
from jaxtrain.models.naming import attention_names, joint_mlp_names, outer_names


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(glm4.Config):
    architecture: ClassVar[str] = "GlmForCausalLM"
    model_type: ClassVar[str] = "glm"


class Model(Decoder):
    def make_block(self, kind: str, config: Config, options: DecoderOptions, rngs: nnx.Rngs):
        bias = config.attention_bias
        return attention_block(config, options, rngs, qkv_bias=bias, adjacent=True)


def names(config: Config) -> list[ParameterEntry]:
    """Every parameter and the tensors of a Hugging Face folder that it is made of."""
    kind, layers = "block", range(config.num_hidden_layers)
    return [
        *outer_names(config),
        *attention_names(kind, layers, qkv_bias=config.attention_bias),
        *joint_mlp_names(kind, layers, config.intermediate_size),
    ]
