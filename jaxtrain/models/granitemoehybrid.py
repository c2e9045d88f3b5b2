"""Granite 4 (IBM 2025): Mamba-2 or attention, and behind it a gated MLP, alone or beside experts;
hybrids without position encoding, pure transformers with rotation."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import numpy as np
from flax import nnx

from jaxtrain.errors import UserError
from jaxtrain.huggingface.config import read_fields
from jaxtrain.huggingface.ops import ParameterEntry
from jaxtrain.layers.linear import LayerInit
from jaxtrain.layers.mamba2 import Mamba2, MambaSizes
from jaxtrain.layers.mixer import LayerSpec
from jaxtrain.layers.mlp import MLP, GatedMLP
from jaxtrain.layers.moe import MoE, MoEOptions
from jaxtrain.layers.router import Router, RoutingOptions
from jaxtrain.models.blocks import block_of
from jaxtrain.models.decoder import Decoder, DecoderOptions
from jaxtrain.models.granite import GraniteConfig, granite_block
from jaxtrain.models.granitemoe import granite_expert_names
from jaxtrain.models.granitemoeshared import shared_names
from jaxtrain.models.mamba import mamba_names, read_dt_limit
from jaxtrain.models.naming import (
    attention_names,
    norm_names,
    outer_names,
)

KINDS = {
    "mamba": "mamba",
    "linear_attention": "mamba",
    "attention": "block",
    "full_attention": "block",
}
"""Entries of `layer_types`, old and new, and under which name such a layer is stored here."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(GraniteConfig):
    architecture: ClassVar[str] = "GraniteMoeHybridForCausalLM"
    model_type: ClassVar[str] = "granitemoehybrid"
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "init_method": ("mup",),
        "normalization_function": ("rmsnorm",),
        "mamba_chunk_size": (),
    }

    layer_types: tuple[str, ...]
    position_embedding_type: str | None = None
    """ "rope", or anything else for none."""
    mamba_n_heads: int
    mamba_d_head: int
    mamba_n_groups: int
    mamba_d_state: int
    mamba_d_conv: int
    mamba_expand: int
    mamba_conv_bias: bool
    time_step_limit: tuple[float, ...]
    shared_intermediate_size: int
    """F of the MLP that all tokens go through; intermediate_size is that of an expert."""
    num_local_experts: int
    """0: the shared MLP is all there is."""
    num_experts_per_tok: int
    router_aux_loss_coef: float = 0.001
    """Only carried along: model.router_aux_loss_coef says what a run trains with."""
    output_router_logits: bool = False
    """Only carried along."""

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        raw = dict(raw)
        if raw.get("mamba_d_head") == "auto":
            del raw["mamba_d_head"]
        if raw.get("time_step_limit") is not None:
            raw["time_step_limit"] = read_dt_limit(raw["time_step_limit"])
        config = cls(**read_fields(cls, raw))
        config.check()
        return config

    def to_hf(self) -> dict[str, Any]:
        old = {"linear_attention": "mamba", "full_attention": "attention"}
        raw = super().to_hf()
        # The spelling of the Hub, which transformers reads in every version.
        raw["layer_types"] = [old.get(name, name) for name in self.layer_types]
        return raw

    def check(self) -> None:
        self.sizes.check()
        if len(self.layer_types) != self.num_hidden_layers or not set(self.layer_types) <= {*KINDS}:
            raise UserError(
                f"config.json: layer_types must name {self.num_hidden_layers} layers"
                f" (num_hidden_layers), each one of {', '.join(KINDS)}"
            )
        if not self.shared_intermediate_size:
            raise UserError(
                "config.json: shared_intermediate_size=0 is not supported in this family, whose"
                " tokens all go through the shared MLP"
            )
        top, count = self.num_experts_per_tok, self.num_local_experts
        if count and not 1 <= top <= count:
            raise UserError(
                f"config.json: num_experts_per_tok={top} must be from 1 to the {count} experts"
            )
        super().check()

    @property
    def sizes(self) -> MambaSizes:
        """Sizes of the Mamba-2 layers."""
        low, high = self.time_step_limit
        return MambaSizes(
            self.mamba_n_heads,
            self.mamba_d_head,
            self.mamba_n_groups,
            self.mamba_d_state,
            self.mamba_d_conv,
            self.mamba_conv_bias,
            (low, high),
        )

    def layers(self) -> tuple[LayerSpec, ...]:
        rope = "default" if self.position_embedding_type == "rope" else "none"
        return tuple(LayerSpec(KINDS[name], rope=rope) for name in self.layer_types)

    def encodings(self) -> dict[str, tuple[np.ndarray, float]]:
        return super().encodings() if self.position_embedding_type == "rope" else {}

    @property
    def experts_per_token(self) -> tuple[int, int] | None:
        count = self.num_local_experts
        return (self.num_experts_per_tok, count) if count else None


class Model(Decoder):
    def make_block(self, kind: str, config: Config, options: DecoderOptions, rngs: nnx.Rngs):
        if kind != "mamba":
            return granite_block(config, options, rngs, make_mlp)
        init = options.layer_init(config, rngs)
        mixer = Mamba2(config.hidden_size, config.sizes, norm_eps=config.rms_norm_eps, init=init)
        return block_of(config, init, mixer, make_mlp, residual_scale=config.residual_multiplier)


def make_mlp(config: Config, init: LayerInit) -> MLP | MoE:
    """The shared MLP, beside experts where there are any."""
    width, act, shared = config.hidden_size, config.hidden_act, config.shared_intermediate_size
    count, top = config.num_local_experts, config.num_experts_per_tok
    if not count:
        return GatedMLP(width, shared, activation=act, init=init)
    return MoE(
        Router(width, count, RoutingOptions(top=top, normalize=True), init=init),
        width,
        config.intermediate_size,
        count,
        MoEOptions(activation=act, num_shared=shared),
        init=init,
    )


def names(config: Config) -> list[ParameterEntry]:
    """Every parameter and the tensors of a Hugging Face folder that it is made of."""
    entries = outer_names(config)
    for kind, layers in config.layers_by_kind().items():
        if kind == "mamba":
            entries += mamba_names(config.sizes, kind, layers, "attention", "mamba")
            entries += norm_names(kind, layers)
        else:
            bias = config.attention_bias
            entries += attention_names(kind, layers, qkv_bias=bias, out_bias=bias)
        path = "mlp.shared" if config.num_local_experts else "mlp"
        entries += shared_names(kind, layers, config.shared_intermediate_size, path)
        if config.num_local_experts:
            entries += granite_expert_names(kind, layers, config.intermediate_size)
    return entries
