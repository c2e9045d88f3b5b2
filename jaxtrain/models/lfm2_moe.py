"""LFM2 with experts (Liquid AI 2025, arXiv:2511.23404): short convolutions, some attention between
them, and behind each an MLP or, but for the first layers, experts chosen by sigmoids."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import ClassVar

from flax import nnx

from jaxtrain.huggingface.ops import ParameterEntry
from jaxtrain.layers.mixer import LayerSpec
from jaxtrain.layers.router import RoutingOptions
from jaxtrain.models import lfm2
from jaxtrain.models.blocks import dense_mlp, experts_mlp
from jaxtrain.models.decoder import Decoder, DecoderOptions
from jaxtrain.models.experts import ExpertsConfig
from jaxtrain.models.naming import expert_names, mlp_names, outer_names


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(lfm2.ConvConfig, ExpertsConfig):
    architecture: ClassVar[str] = "Lfm2MoeForCausalLM"
    model_type: ClassVar[str] = "lfm2_moe"
    old_keys: ClassVar[Mapping[str, str]] = lfm2.OLD_TIE
    renamed: ClassVar[Mapping[str, str]] = {
        **lfm2.ConvConfig.renamed,
        "num_local_experts": "num_experts",
    }

    moe_intermediate_size: int
    """F of an expert; intermediate_size is that of a dense layer."""
    num_dense_layers: int
    """How many of the first layers are dense; those are stored as <kind>_dense."""
    norm_topk_prob: bool
    """Whether the gates of a token sum to 1 before they are scaled."""
    routed_scaling_factor: float
    use_expert_bias: bool
    """Whether a correction bias moves the choice."""

    def layers(self) -> tuple[LayerSpec, ...]:
        return tuple(
            LayerSpec(spec.kind + ("_dense" if layer < self.num_dense_layers else ""))
            for layer, spec in enumerate(super().layers())
        )

    @property
    def routing(self) -> RoutingOptions:
        return RoutingOptions(
            top=self.num_experts_per_tok,
            score="sigmoid",
            normalize=self.norm_topk_prob,
            eps=1e-6,
            scale=self.routed_scaling_factor,
        )


class Model(Decoder):
    def make_block(self, kind: str, config: Config, options: DecoderOptions, rngs: nnx.Rngs):
        experts = functools.partial(
            experts_mlp,
            num_hidden=config.moe_intermediate_size,
            choice_bias=config.use_expert_bias,
        )
        make_mlp = dense_mlp if kind.endswith("_dense") else experts
        return lfm2.make_mixing_block(kind, config, options, rngs, make_mlp)


def names(config: Config) -> list[ParameterEntry]:
    """Every parameter and the tensors of a Hugging Face folder that it is made of."""
    entries = outer_names(config, norm="embedding_norm")
    for kind, layers in config.layers_by_kind().items():
        entries += lfm2.mixing_names(config, kind, layers)
        if kind.endswith("_dense"):
            entries += mlp_names(kind, layers, module="feed_forward", parts=lfm2.PARTS)
            continue
        entries += expert_names(
            kind,
            layers,
            config.num_local_experts,
            module="feed_forward",
            parts=lfm2.PARTS,
            choice_bias="expert_bias" if config.use_expert_bias else None,
        )
    return entries
