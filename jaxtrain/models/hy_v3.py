"""Hunyuan 3 (Tencent 2026): experts chosen by sigmoids beside a shared one, behind attention whose
queries and keys are normed."""

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(ExpertsConfig):
    architecture: ClassVar[str] = "HYV3ForCausalLM"
    model_type: ClassVar[str] = "hy_v3"
    renamed: ClassVar[Mapping[str, str]] = {"num_local_experts": "num_experts"}
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {"enable_moe_fp32_combine": ()}
    """Decides only where sums are rounded."""

    moe_intermediate_size: int
    """F of an expert; intermediate_size is that of a dense layer."""
    num_shared_experts: int
    """Experts that every token goes through: one MLP of so many times F."""
    router_scaling_factor: float
    """Factor of gates, which sum to 1 before."""
    mlp_layer_types: tuple[str, ...]
    attention_bias: bool = False
    """On all four projections."""

    def layers(self) -> tuple[LayerSpec, ...]:
        return list_experts(super().layers(), self.mlp_layer_types)

    @property
    def routing(self) -> RoutingOptions:
        top, scale = self.num_experts_per_tok, self.router_scaling_factor
        return RoutingOptions(top=top, score="sigmoid", normalize=True, scale=scale)


class Model(Decoder):
    def make_block(self, kind: str, config: Config, options: DecoderOptions, rngs: nnx.Rngs):
        experts = functools.partial(
            experts_mlp,
            num_hidden=config.moe_intermediate_size,
            num_shared=config.moe_intermediate_size * config.num_shared_experts,
            choice_bias=True,
            wide=True,
        )
        make_mlp, bias = dense_mlp if kind == "dense" else experts, config.attention_bias
        return attention_block(
            config, options, rngs, qkv_bias=bias, out_bias=bias, qk_norm="head", make_mlp=make_mlp
        )


def names(config: Config) -> list[ParameterEntry]:
    """Every parameter and the tensors of a Hugging Face folder that it is made of."""
    entries, bias = outer_names(config), config.attention_bias
    experts = {"router": "router.gate", "choice_bias": "expert_bias", "shared": "shared_mlp"}
    for kind, layers in config.layers_by_kind().items():
        entries += attention_names(kind, layers, qkv_bias=bias, out_bias=bias, qk_norm=True)
        if kind == "dense":
            entries += mlp_names(kind, layers)
        else:
            entries += expert_names(kind, layers, config.num_local_experts, **experts)
    return entries
