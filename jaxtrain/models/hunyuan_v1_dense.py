"""Hunyuan dense (Tencent 2025): Llama with norms on queries and keys behind the rotation."""

import dataclasses
from typing import ClassVar

from flax import nnx

from jaxtrain.hf.ops import Entry
from jaxtrain.models.blocks import attention_block
from jaxtrain.models.decoder import Decoder, DecoderConfig, Options
from jaxtrain.models.naming import decoder_names

QK_NORMS = ("query_layernorm", "key_layernorm")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    architecture: ClassVar[str] = "HunYuanDenseV1ForCausalLM"
    model_type: ClassVar[str] = "hunyuan_v1_dense"
    rope_keys: ClassVar[tuple[str, ...]] = ("alpha",)

    attention_bias: bool = False
    """On all four projections."""
    eod_token_id: int | None = None
    """Only carried along."""


class Model(Decoder):
    def make_block(self, kind: str, config: Config, options: Options, rngs: nnx.Rngs):
        bias = config.attention_bias
        return attention_block(
            config, options, rngs, qkv_bias=bias, out_bias=bias, qk_norm="rotated_head"
        )


def names(config: Config) -> list[Entry]:
    """Every parameter and the tensors of a Hugging Face folder that it is made of."""
    bias = config.attention_bias
    return decoder_names(config, qkv_bias=bias, out_bias=bias, qk_norm=True, qk_norms=QK_NORMS)
