"""Command R (Cohere 2024): attention and MLP side by side behind one LayerNorm without a bias,
pairs of adjacent dims rotated, scaled logits."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from flax import nnx

from jaxtrain.huggingface.ops import ParameterEntry
from jaxtrain.layers.norm import RMSNorm, ScaledLayerNorm
from jaxtrain.models.blocks import attention_block
from jaxtrain.models.decoder import Decoder, DecoderOptions
from jaxtrain.models.decoder_config import DecoderConfig
from jaxtrain.models.naming import decoder_names

NORMS = {"attention_norm": "input_layernorm"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CohereConfig(DecoderConfig):
    """A DecoderConfig with what all Commands have."""

    renamed: ClassVar[Mapping[str, str]] = {
        "rms_norm_eps": "layer_norm_eps",
        "factor": "logit_scale",
    }
    norm: ClassVar[type[RMSNorm]] = ScaledLayerNorm

    factor: float
    """Of logits."""
    attention_bias: bool = False
    """On all four projections."""

    @property
    def logit_scale(self) -> float:
        return self.factor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(CohereConfig):
    architecture: ClassVar[str] = "CohereForCausalLM"
    model_type: ClassVar[str] = "cohere"


class Model(Decoder):
    def make_block(self, kind: str, config: CohereConfig, options: DecoderOptions, rngs: nnx.Rngs):
        bias = config.attention_bias
        return attention_block(
            config,
            options,
            rngs,
            norms=NORMS,
            parallel=True,
            qkv_bias=bias,
            out_bias=bias,
            adjacent=True,
        )


def names(config: CohereConfig) -> list[ParameterEntry]:
    """Every parameter and the tensors of a Hugging Face folder that it is made of."""
    bias = config.attention_bias
    return decoder_names(config, qkv_bias=bias, out_bias=bias, norms=NORMS)
