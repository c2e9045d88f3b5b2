"""AFM (Arcee 2025): Llama whose MLP has no gate, behind a squared ReLU."""

import dataclasses
import functools
from typing import ClassVar

from flax import nnx

from jaxtrain.huggingface.ops import ParameterEntry
from jaxtrain.models import llama
from jaxtrain.models.blocks import attention_block, plain_mlp
from jaxtrain.models.decoder import Decoder, DecoderOptions
from jaxtrain.models.naming import PLAIN_PARTS, decoder_names


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(llama.Config):
    architecture: ClassVar[str] = "ArceeForCausalLM"
    model_type: ClassVar[str] = "arcee"


class Model(Decoder):
    def make_block(self, kind: str, config: Config, options: DecoderOptions, rngs: nnx.Rngs):
        bias = config.attention_bias
        make_mlp = functools.partial(plain_mlp, use_bias=config.mlp_bias)
        return attention_block(
            config, options, rngs, qkv_bias=bias, out_bias=bias, make_mlp=make_mlp
        )


def names(config: Config) -> list[ParameterEntry]:
    """Every parameter and the tensors of a Hugging Face folder that it is made of."""
    return decoder_names(
        config,
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
        mlp_parts=PLAIN_PARTS,
    )
