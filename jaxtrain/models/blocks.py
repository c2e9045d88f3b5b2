"""The block that the decoders here share, from a config and the few things in which they differ."""

from collections.abc import Callable, Mapping
from typing import Any

from flax import nnx

from jaxtrain.layers.attention import Attention
from jaxtrain.layers.block import PreNormBlock
from jaxtrain.layers.mixer import Mixer
from jaxtrain.layers.mlp import GatedMLP
from jaxtrain.layers.moe import MoE
from jaxtrain.layers.router import Router
from jaxtrain.models.decoder import DecoderConfig, Options
from jaxtrain.models.experts import ExpertsConfig

MakeMLP = Callable[[DecoderConfig, Mapping[str, Any]], GatedMLP | MoE]
"""(config, the keyword arguments of layers with weights) -> what stands behind the attention."""


def dense_mlp(config: DecoderConfig, common: Mapping[str, Any], use_bias: bool = False) -> GatedMLP:
    """An MLP of `intermediate_size`."""
    width, hidden, act = config.hidden_size, config.intermediate_size, config.hidden_act
    return GatedMLP(width, hidden, activation=act, use_bias=use_bias, **common)


def experts_mlp(
    config: ExpertsConfig, common: Mapping[str, Any], num_hidden: int, normalise: bool
) -> MoE:
    """Experts of `num_hidden` each; normalise: the gates of a token sum to 1."""
    width, count, top = config.hidden_size, config.num_local_experts, config.num_experts_per_tok
    router = Router(width, count, top=top, normalise=normalise, **common)
    return MoE(router, width, num_hidden, count, activation=config.hidden_act, **common)


def attention_block(
    config: DecoderConfig,
    options: Options,
    rngs: nnx.Rngs,
    *,
    qkv_bias: bool = False,
    out_bias: bool = False,
    qk_norm: bool = False,
    output_gate: bool = False,
    make_mlp: MakeMLP = dense_mlp,
    attention: type[Attention] = Attention,
) -> PreNormBlock:
    """Attention and an MLP, each behind an RMSNorm."""
    common = options.layer_options(config, rngs)
    width, eps = config.hidden_size, config.rms_norm_eps
    mixer = attention(
        width,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_size,
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        qk_norm_eps=eps if qk_norm else None,
        norm=config.norm,
        output_gate=output_gate,
        impl=options.attention_impl,
        **common,
    )
    return pre_norm_block(config, common, mixer, make_mlp)


def pre_norm_block(
    config: DecoderConfig, common: Mapping[str, Any], mixer: Mixer, make_mlp: MakeMLP = dense_mlp
) -> PreNormBlock:
    """What mixes tokens and an MLP, each behind the family's norm."""
    width, eps, dtype = config.hidden_size, config.rms_norm_eps, common["param_dtype"]
    norms = [config.norm(width, eps=eps, param_dtype=dtype) for _ in range(2)]
    return PreNormBlock(norms[0], mixer, norms[1], make_mlp(config, common))
