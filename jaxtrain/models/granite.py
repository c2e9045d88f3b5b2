"""Granite 3 dense (IBM 2024): Llama with four multipliers, which the later Granites have, too."""

import dataclasses
import functools
from typing import Any, ClassVar

from flax import nnx

from jaxtrain.errors import UserError
from jaxtrain.huggingface.ops import ParameterEntry
from jaxtrain.layers.block import Block
from jaxtrain.models.blocks import MakeMLP, attention_block, dense_mlp
from jaxtrain.models.decoder import Decoder, DecoderOptions
from jaxtrain.models.decoder_config import DecoderConfig
from jaxtrain.models.naming import decoder_names


@dataclasses.dataclass(frozen=True, kw_only=True)
class GraniteConfig(DecoderConfig):
    """A DecoderConfig with what all Granites have."""

    attention_bias: bool = False
    """On all four projections."""
    attention_multiplier: float
    """Scale of scores."""
    embedding_multiplier: float
    residual_multiplier: float
    logits_scaling: float
    """Logits are divided by it."""

    def check(self) -> None:
        if self.logits_scaling <= 0:
            raise UserError(f"config.json: logits_scaling={self.logits_scaling} must be above 0")
        super().check()

    @property
    def embedding_scale(self) -> float:
        return self.embedding_multiplier

    @property
    def logit_scale(self) -> float:
        return 1 / self.logits_scaling


def granite_block(
    config: GraniteConfig,
    options: DecoderOptions,
    rngs: nnx.Rngs,
    make_mlp: MakeMLP,
    **choices: Any,
) -> Block:
    """Attention and what stands behind it; choices: further ones of `attention_block`."""
    block = attention_block(
        config,
        options,
        rngs,
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
        scale=config.attention_multiplier,
        make_mlp=make_mlp,
        **choices,
    )
    block.residual_scale = config.residual_multiplier
    return block


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(GraniteConfig):
    architecture: ClassVar[str] = "GraniteForCausalLM"
    model_type: ClassVar[str] = "granite"

    mlp_bias: bool = False


class Model(Decoder):
    def make_block(self, kind: str, config: Config, options: DecoderOptions, rngs: nnx.Rngs):
        make_mlp = functools.partial(dense_mlp, use_bias=config.mlp_bias)
        return granite_block(config, options, rngs, make_mlp)


def names(config: Config) -> list[ParameterEntry]:
    """Every parameter and the tensors of a Hugging Face folder that it is made of."""
    bias = config.attention_bias
    return decoder_names(config, qkv_bias=bias, out_bias=bias, mlp_bias=config.mlp_bias)
