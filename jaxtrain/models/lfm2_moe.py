"""LFM2 with experts (Liquid AI 2025, arXiv:2511.23404): short convolutions, some attention between
them, and behind each an MLP or, but for the first layers, experts chosen by sigmoids."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from flax import nnx

from jaxtrain.errors import UserError
from jaxtrain.huggingface.ops import ParameterEntry
from jaxtrain.layers.mixer import LayerSpec
from jaxtrain.layers.router import RoutingOptions
from jaxtrain.layers.short_conv import ShortConv
from jaxtrain.models.blocks import attention_block, block_of, dense_mlp, experts_mlp
from jaxtrain.models.decoder import Decoder, DecoderOptions
from jaxtrain.models.experts import ExpertsConfig
from jaxtrain.models.naming import (
    attention_names,
    expert_names,
    joint_names,
    layer_entry,
    linear_entries,
    mlp_names,
    norm_names,
    outer_names,
)

KINDS = {"conv": "conv", "full_attention": "block"}
"""Entries of `layer_types`, and under which name such a layer is stored here; a dense one of the
first as <name>_dense."""
NORMS = {"attention_norm": "operator_norm", "mlp_norm": "ffn_norm"}
PARTS = {"gate": "w1", "up": "w3", "down": "w2"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(ExpertsConfig):
    architecture: ClassVar[str] = "Lfm2MoeForCausalLM"
    model_type: ClassVar[str] = "lfm2_moe"
    renamed: ClassVar[Mapping[str, str]] = {
        "num_local_experts": "num_experts",
        "rms_norm_eps": "norm_eps",
    }

    hidden_act: str = "silu"
    """Of the family; no attribute of its files."""
    moe_intermediate_size: int
    """F of an expert; intermediate_size is that of a dense layer."""
    layer_types: tuple[str, ...]
    """Of KINDS."""
    conv_L_cache: int
    """Tokens that a convolution reads."""
    num_dense_layers: int
    """How many of the first layers are dense."""
    norm_topk_prob: bool
    """Whether the gates of a token sum to 1 before they are scaled."""
    routed_scaling_factor: float
    use_expert_bias: bool
    """Whether a correction bias moves the choice."""

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        raw = dict(raw)
        tied = raw.pop("tie_embedding", None)
        if tied is not None:
            raw["tie_word_embeddings"] = tied
        return super().from_hf(raw)

    def to_hf(self) -> dict[str, Any]:
        raw = super().to_hf()
        del raw["hidden_act"]
        return raw

    def layers(self) -> tuple[LayerSpec, ...]:
        return tuple(
            LayerSpec(KINDS[name] + ("_dense" if layer < self.num_dense_layers else ""))
            for layer, name in enumerate(self.layer_types)
        )

    def check(self) -> None:
        if len(self.layer_types) != self.num_hidden_layers or not set(self.layer_types) <= {*KINDS}:
            raise UserError(
                f"config.json: layer_types must name {self.num_hidden_layers} layers"
                f" (num_hidden_layers), each one of {', '.join(KINDS)}"
            )
        if self.conv_L_cache < 2:
            raise UserError(f"config.json: conv_L_cache={self.conv_L_cache} must be at least 2")
        super().check()

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
        if kind.startswith("block"):
            return attention_block(config, options, rngs, qk_norm="head", make_mlp=make_mlp)
        init = options.layer_init(config, rngs)
        mixer = ShortConv(config.hidden_size, taps=config.conv_L_cache, init=init)
        return block_of(config, init, mixer, make_mlp)


def names(config: Config) -> list[ParameterEntry]:
    """Every parameter and the tensors of a Hugging Face folder that it is made of."""
    entries, width = outer_names(config, norm="embedding_norm"), config.hidden_size
    for kind, layers in config.layers_by_kind().items():
        if kind.startswith("block"):
            entries += attention_names(
                kind,
                layers,
                qk_norm=True,
                qk_norms=("q_layernorm", "k_layernorm"),
                out="out_proj",
                norms=NORMS,
            )
        else:
            entries += norm_names(kind, layers, NORMS)
            parts = {f"attention.{part}": width for part in ("gate_in", "gate_out", "x")}
            entries += joint_names(kind, layers, "conv.in_proj", parts)
            entries.append(layer_entry(kind, layers, "attention.conv", "conv.conv.weight"))
            entries += linear_entries(kind, layers, "attention.out", "conv.out_proj")
        if kind.endswith("_dense"):
            entries += mlp_names(kind, layers, module="feed_forward", parts=PARTS)
            continue
        entries += expert_names(
            kind,
            layers,
            config.num_local_experts,
            module="feed_forward",
            parts=PARTS,
            choice_bias="expert_bias" if config.use_expert_bias else None,
        )
    return entries
