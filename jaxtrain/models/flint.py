"""Flint: experts chosen by sigmoids beside a shared one, behind attention with sinks and normed
queries and keys; only layers with a window are rotated."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import ClassVar

from flax import nnx

from jaxtrain.huggingface.ops import ParameterEntry
from jaxtrain.layers.mixer import LayerSpec
from jaxtrain.layers.norm import PreciseRMSNorm, RMSNorm
from jaxtrain.layers.router import RoutingOptions
from jaxtrain.models.blocks import attention_block, dense_mlp, experts_mlp
from jaxtrain.models.decoder import Decoder, DecoderOptions
from jaxtrain.models.experts import SparseStepConfig
from jaxtrain.models.naming import (
    attention_names,
    expert_names,
    layer_entry,
    mlp_names,
    outer_names,
)
from jaxtrain.models.windows import unrotated, windowed_layers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(SparseStepConfig):
    architecture: ClassVar[str] = "FlintForCausalLM"
    model_type: ClassVar[str] = "flint"
    renamed: ClassVar[Mapping[str, str]] = {"num_local_experts": "num_experts"}
    norm: ClassVar[type[RMSNorm]] = PreciseRMSNorm

    shared_expert_intermediate_size: int
    """F of the shared expert."""
    attention_bias: bool = False
    """On all four projections."""
    sliding_window: int
    layer_types: tuple[str, ...]

    def layers(self) -> tuple[LayerSpec, ...]:
        windows = windowed_layers(self.num_hidden_layers, self.layer_types, self.sliding_window)
        return tuple(
            dataclasses.replace(spec, kind=self.kind(layer))
            for layer, spec in enumerate(unrotated(windows))
        )

    @property
    def routing(self) -> RoutingOptions:
        top, normalize = self.num_experts_per_tok, self.norm_topk_prob
        return RoutingOptions(top=top, score="sigmoid", normalize=normalize)


class Model(Decoder):
    def make_block(self, kind: str, config: Config, options: DecoderOptions, rngs: nnx.Rngs):
        experts = functools.partial(
            experts_mlp,
            num_hidden=config.moe_intermediate_size,
            num_shared=config.shared_expert_intermediate_size,
            wide=True,
        )
        bias = config.attention_bias
        return attention_block(
            config,
            options,
            rngs,
            qkv_bias=bias,
            out_bias=bias,
            qk_norm="head",
            sinks=True,
            make_mlp=dense_mlp if kind == "dense" else experts,
        )


def names(config: Config) -> list[ParameterEntry]:
    """Every parameter and the tensors of a Hugging Face folder that it is made of."""
    entries, bias = outer_names(config), config.attention_bias
    for kind, layers in config.layers_by_kind().items():
        entries += attention_names(kind, layers, qkv_bias=bias, out_bias=bias, qk_norm=True)
        entries.append(layer_entry(kind, layers, "attention.sinks", "self_attn.softmax_offset"))
        if kind == "dense":
            entries += mlp_names(kind, layers)
        else:
            count = config.num_local_experts
            entries += expert_names(kind, layers, count, shared="shared_expert")
    return entries
