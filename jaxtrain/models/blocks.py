"""The block that the decoders share, built from a config and the few options in which they
differ."""

import dataclasses
import functools
from collections.abc import Callable, Collection
from typing import Any

from flax import nnx

from jaxtrain.layers.attention import Attention, AttentionOptions
from jaxtrain.layers.block import Block
from jaxtrain.layers.linear import LayerInit
from jaxtrain.layers.mixer import Mixer
from jaxtrain.layers.mlp import MLP, GatedMLP
from jaxtrain.layers.moe import MoE, MoEOptions
from jaxtrain.layers.router import Router
from jaxtrain.models.decoder import DecoderOptions
from jaxtrain.models.decoder_config import DecoderConfig
from jaxtrain.models.experts import ExpertsConfig, GroupedExpertsConfig
from jaxtrain.models.naming import PRE_NORMS

MakeMLP = Callable[[DecoderConfig, LayerInit], MLP | MoE]
"""(config, how parameters are created) -> the layer behind the attention."""


def dense_mlp(config: DecoderConfig, init: LayerInit, use_bias: bool = False) -> GatedMLP:
    """Build a gated MLP of `intermediate_size`."""
    width, hidden, act = config.hidden_size, config.intermediate_size, config.hidden_act
    return GatedMLP(width, hidden, activation=act, use_bias=use_bias, init=init)


def plain_mlp(config: DecoderConfig, init: LayerInit, use_bias: bool = False) -> MLP:
    """Build an MLP of `intermediate_size` without a gate."""
    width, hidden, act = config.hidden_size, config.intermediate_size, config.hidden_act
    return MLP(width, hidden, activation=act, use_bias=use_bias, init=init)


def experts_mlp(config: ExpertsConfig, init: LayerInit, num_hidden: int, **choices: Any) -> MoE:
    """Build experts of `num_hidden` each, routed by `config.routing`; choices: options of MoE and
    of Router."""
    width, count = config.hidden_size, config.num_local_experts
    named = {field.name for field in dataclasses.fields(MoEOptions)} & set(choices)
    options = {"activation": config.hidden_act, **{name: choices.pop(name) for name in named}}
    chooser = Router(width, count, config.routing, **choices, init=init)
    return MoE(chooser, width, num_hidden, count, MoEOptions(**options), init=init)


def grouped_experts_mlp(config: GroupedExpertsConfig, init: LayerInit) -> MoE:
    """Build DeepSeek-V3's routed and shared experts."""
    return experts_mlp(
        config,
        init,
        config.moe_intermediate_size,
        num_shared=config.shared_width,
        choice_bias=config.routing.score == "sigmoid",
        wide=config.wide_router,
    )


def attention_block(
    config: DecoderConfig,
    options: DecoderOptions,
    rngs: nnx.Rngs,
    *,
    make_mlp: MakeMLP = dense_mlp,
    attention: type[Attention] = Attention,
    norms: Collection[str] = PRE_NORMS,
    parallel: bool = False,
    **choices: Any,
) -> Block:
    """Build a block of attention and an MLP with the norms `norms` (see `block_of`); choices:
    further options of `Attention`."""
    init = options.layer_init(config, rngs)
    mixer = attention(
        config.hidden_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_size,
        AttentionOptions(
            impl=options.attention_impl,
            **{"norm": config.norm, "eps": config.rms_norm_eps, **choices},
        ),
        init=init,
    )
    return block_of(config, init, mixer, make_mlp, norms=norms, parallel=parallel)


def block_of(
    config: DecoderConfig,
    init: LayerInit,
    mixer: Mixer,
    make_mlp: MakeMLP = dense_mlp,
    *,
    norms: Collection[str] = PRE_NORMS,
    parallel: bool = False,
    residual_scale: float = 1.0,
) -> Block:
    """Build a block of a token mixer and an MLP; norms: the block's norms by their names in
    `Block`, such as the keys of PRE_NORMS, POST_NORMS or SANDWICH_NORMS of models.naming; parallel:
    of `Block`."""
    make = functools.partial(
        config.norm, config.hidden_size, eps=config.rms_norm_eps, param_dtype=init.param_dtype
    )
    mlp, norm_layers = make_mlp(config, init), {name: make() for name in norms}
    return Block(mixer, mlp, parallel=parallel, residual_scale=residual_scale, **norm_layers)
