"""Persimmon (Adept 2023): LayerNorm, on each head's queries and keys, too, half of a head rotated,
and an MLP without a gate behind a squared ReLU."""

import dataclasses
import functools
from typing import ClassVar

from flax import nnx

from jaxtrain.huggingface.ops import ParameterEntry
from jaxtrain.models.blocks import attention_block, plain_mlp
from jaxtrain.models.decoder import Decoder, DecoderOptions
from jaxtrain.models.joint_heads import EqualHeadsConfig, joint_head_names
from jaxtrain.models.naming import PRE_NORMS, norm_names, outer_names

QK_NORMS = {
    "attention.q_norm": "self_attn.q_layernorm",
    "attention.k_norm": "self_attn.k_layernorm",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(EqualHeadsConfig):
    architecture: ClassVar[str] = "PersimmonForCausalLM"
    model_type: ClassVar[str] = "persimmon"

    qk_layernorm: bool = True
    """A norm over each head's queries and keys."""


class Model(Decoder):
    def make_block(self, kind: str, config: Config, options: DecoderOptions, rngs: nnx.Rngs):
        return attention_block(
            config,
            options,
            rngs,
            qkv_bias=True,
            out_bias=True,
            qk_norm="head" if config.qk_layernorm else None,
            make_mlp=functools.partial(plain_mlp, use_bias=True),
        )


def names(config: Config) -> list[ParameterEntry]:
    """Every parameter and the tensors of a Hugging Face folder that it is made of."""
    layers, count = range(config.num_hidden_layers), config.num_attention_heads
    heads, parts = (count, count, config.head_size), config.norm.parameters
    norms = {**PRE_NORMS, **(QK_NORMS if config.qk_layernorm else {})}
    return [
        *outer_names(config, "final_layernorm"),
        *norm_names("block", layers, norms, parts=parts),
        *joint_head_names("block", layers, heads, qkv_bias=True, out_bias=True, mlp_bias=True),
    ]
