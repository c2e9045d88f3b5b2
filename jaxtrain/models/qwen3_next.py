"""Qwen3-Next (Qwen Team 2025): linear and gated full attention with experts in all layers, or with
some dense ones between."""

import dataclasses
import functools
from typing import ClassVar

from flax import nnx

from jaxtrain.errors import UserError
from jaxtrain.huggingface.ops import ParameterEntry
from jaxtrain.models.blocks import dense_mlp
from jaxtrain.models.decoder import Decoder, DecoderOptions
from jaxtrain.models.hybrid import joint_projection_names, linear_names, make_mixing_block
from jaxtrain.models.hybrid_experts import (
    HybridExpertsConfig,
    shared_expert_names,
    shared_experts_mlp,
)
from jaxtrain.models.naming import attention_names, mlp_names, outer_names, with_prefix


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(HybridExpertsConfig):
    architecture: ClassVar[str] = "Qwen3NextForCausalLM"
    model_type: ClassVar[str] = "qwen3_next"
    text_type: ClassVar[str] = "qwen3_next"

    norm_topk_prob: bool = True
    """Whether the gates of a token sum to 1."""
    decoder_sparse_step: int = 1
    """Every so many-th layer has experts."""
    mlp_only_layers: tuple[int, ...] = ()
    """Layers that are dense nevertheless."""

    def check(self) -> None:
        if self.decoder_sparse_step < 1:
            raise UserError(
                f"config.json: decoder_sparse_step={self.decoder_sparse_step} must be at least 1"
            )
        super().check()

    def kind(self, layer: int) -> str:
        sparse = (layer + 1) % self.decoder_sparse_step == 0
        dense = not sparse or layer in self.mlp_only_layers
        mixing = super().kind(layer)
        return f"dense_{mixing}" if dense else mixing


class Model(Decoder):
    def make_block(self, kind: str, config: Config, options: DecoderOptions, rngs: nnx.Rngs):
        experts = functools.partial(shared_experts_mlp, normalize=config.norm_topk_prob)
        make_mlp = dense_mlp if kind.startswith("dense_") else experts
        return make_mixing_block(kind.endswith("linear"), config, options, rngs, make_mlp)


def names(config: Config) -> list[ParameterEntry]:
    """Every parameter and the tensors of a Hugging Face folder that it is made of."""
    entries = outer_names(config)
    for kind, layers in config.layers_by_kind().items():
        if kind.endswith("linear"):
            entries += linear_names(config, kind, layers)
            entries += joint_projection_names(config, kind, layers)
        else:
            entries += attention_names(kind, layers, qk_norm=True)
        if kind.startswith("dense_"):
            entries += mlp_names(kind, layers)
        else:
            entries += shared_expert_names(config, kind, layers)
    return with_prefix(entries, config.prefix)
