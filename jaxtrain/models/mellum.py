"""Mellum 2 (JetBrains 2026): Qwen3-MoE whose layers with a window have a position encoding of their
own."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar

from flax import nnx

from jaxtrain.huggingface.ops import ParameterEntry
from jaxtrain.layers.mixer import LayerSpec
from jaxtrain.layers.router import RoutingOptions
from jaxtrain.models.blocks import attention_block, dense_mlp, experts_mlp
from jaxtrain.models.decoder import Decoder, DecoderOptions
from jaxtrain.models.experts import ExpertsConfig, list_experts
from jaxtrain.models.naming import attention_names, expert_names, mlp_names, outer_names
from jaxtrain.models.windows import FULL, SLIDING, windowed_layers

MTP_KEYS = ("num_mtp_layers", "mtp_layer_types", "mtp_mlp_layer_types")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(ExpertsConfig):
    architecture: ClassVar[str] = "MellumForCausalLM"
    model_type: ClassVar[str] = "mellum"
    newer: ClassVar[bool] = True
    rope_by_kind: ClassVar[bool] = True
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = dict.fromkeys(MTP_KEYS, ())
    """Attributes of layers that predict further tokens, which are carried along."""
    carries: ClassVar[tuple[str, ...]] = ("mtp.", "model.mtp.")
    goes_stale: ClassVar[tuple[str, ...]] = carries

    moe_intermediate_size: int
    """F of an expert; intermediate_size is that of a dense layer."""
    norm_topk_prob: bool
    """True if the gates of a token sum to 1."""
    num_nextn_predict_layers: int | None = None
    """Number of the layers that predict further tokens."""
    attention_bias: bool = False
    """On all four projections."""
    sliding_window: int | None = None
    layer_types: tuple[str, ...]
    mlp_layer_types: tuple[str, ...]

    def layers(self) -> tuple[LayerSpec, ...]:
        kinds = (SLIDING, FULL)
        windows = windowed_layers(
            self.num_hidden_layers, self.layer_types, self.sliding_window, kinds
        )
        return list_experts(windows, self.mlp_layer_types)

    @property
    def routing(self) -> RoutingOptions:
        return RoutingOptions(top=self.num_experts_per_tok, normalize=self.norm_topk_prob)


class Model(Decoder):
    def make_block(self, kind: str, config: Config, options: DecoderOptions, rngs: nnx.Rngs):
        experts = functools.partial(experts_mlp, num_hidden=config.moe_intermediate_size)
        make_mlp, bias = dense_mlp if kind == "dense" else experts, config.attention_bias
        return attention_block(
            config, options, rngs, qkv_bias=bias, out_bias=bias, qk_norm="head", make_mlp=make_mlp
        )


def names(config: Config) -> list[ParameterEntry]:
    """Every parameter and the tensors of a Hugging Face folder that it is made of."""
    entries, bias = outer_names(config), config.attention_bias
    for kind, layers in config.layers_by_kind().items():
        entries += attention_names(kind, layers, qkv_bias=bias, out_bias=bias, qk_norm=True)
        if kind == "dense":
            entries += mlp_names(kind, layers)
        else:
            entries += expert_names(kind, layers, config.num_local_experts)
    return entries
