"""Code World Model (Meta 2025, arXiv:2510.02387): Llama with a window in three of four layers."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar

from flax import nnx

from jaxtrain.huggingface.ops import ParameterEntry
from jaxtrain.models import ministral
from jaxtrain.models.blocks import attention_block, dense_mlp
from jaxtrain.models.decoder import Decoder, DecoderOptions
from jaxtrain.models.naming import decoder_names


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(ministral.Config):
    architecture: ClassVar[str] = "CwmForCausalLM"
    model_type: ClassVar[str] = "cwm"
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {"attention_bias": (False,)}

    mlp_bias: bool = False


class Model(Decoder):
    def make_block(self, kind: str, config: Config, options: DecoderOptions, rngs: nnx.Rngs):
        make_mlp = functools.partial(dense_mlp, use_bias=config.mlp_bias)
        return attention_block(config, options, rngs, make_mlp=make_mlp)


def names(config: Config) -> list[ParameterEntry]:
    """Every parameter and the tensors of a Hugging Face folder that it is made of."""
    return decoder_names(config, mlp_bias=config.mlp_bias)
