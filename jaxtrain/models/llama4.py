"""Llama 4 (Meta 2025): an expert beside a shared one in all or every other layer, attention in
chunks, and layers that rotate nothing, whose queries grow with their position.

Published folders are multimodal; their vision tower is carried along."""

import dataclasses
import functools
from typing import Any, ClassVar

from flax import nnx

from jaxtrain.errors import UserError
from jaxtrain.huggingface.ops import ParameterEntry
from jaxtrain.layers.linear import LayerInit
from jaxtrain.layers.mixer import LayerSpec
from jaxtrain.layers.mlp import GatedMLP
from jaxtrain.layers.norm import UnitRMSNorm
from jaxtrain.layers.rope import PositionScale
from jaxtrain.layers.router import RoutingOptions
from jaxtrain.models.blocks import attention_block, experts_mlp
from jaxtrain.models.decoder import Decoder, DecoderOptions
from jaxtrain.models.experts import ExpertsConfig
from jaxtrain.models.multimodal import TextConfig
from jaxtrain.models.naming import (
    attention_names,
    fused_expert_names,
    linear_entries,
    mlp_names,
    outer_names,
    transpose_experts,
    with_prefix,
)
from jaxtrain.models.windows import CHUNKED, windowed_layers

KINDS = {
    (True, True): "block",
    (True, False): "dense",
    (False, True): "unrotated",
    (False, False): "unrotated_dense",
}
"""{(rotates, has experts): under which name such a layer is stored here}."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(TextConfig, ExpertsConfig):
    architecture: ClassVar[str] = "Llama4ForCausalLM"
    also: ClassVar[tuple[str, ...]] = ("Llama4ForConditionalGeneration",)
    model_type: ClassVar[str] = "llama4"
    text_type: ClassVar[str] = "llama4_text"
    carries: ClassVar[tuple[str, ...]] = ("vision_model.", "multi_modal_projector.")
    prefixes: ClassVar[tuple[str, ...]] = ("language_model.model.", "model.")
    media: ClassVar[tuple[str, ...]] = ("image_token_index", "boi_token_index", "eoi_token_index")
    experts_swapped: ClassVar[bool] = True

    intermediate_size_mlp: int
    """F of a dense layer; intermediate_size is that of an expert."""
    moe_layers: tuple[int, ...]
    """Layers with experts."""
    interleave_moe_layer_step: int
    """Every so many-th layer has experts where moe_layers is absent."""
    no_rope_layers: tuple[int, ...]
    """1 for each layer that rotates queries and keys, else 0."""
    no_rope_layer_interval: int
    """Every so many-th layer rotates nothing where no_rope_layers is absent."""
    layer_types: tuple[str, ...]
    attention_chunk_size: int | None = None
    """Positions of a chunk, which sees nothing of earlier ones."""
    use_qk_norm: bool
    """Queries and keys that are rotated are normalized then."""
    attn_temperature_tuning: bool
    """Queries that are not rotated grow with their position."""
    attn_scale: float
    floor_scale: int
    attention_bias: bool = False
    """On all four projections."""

    @classmethod
    def read_text(cls, text: dict[str, Any]) -> dict[str, Any]:
        for key in ("interleave_moe_layer_step", "no_rope_layer_interval"):
            value = text.get(key, 1)
            if type(value) is int and value < 1:
                raise UserError(f"config.json: {key}={value} must be at least 1")
        return super().read_text(cls.join_aliases(text))

    def check(self) -> None:
        count, rotates = self.num_hidden_layers, self.no_rope_layers
        if len(rotates) != count or not set(rotates) <= {0, 1}:
            raise UserError(
                f"config.json: no_rope_layers must be a list of {count} numbers"
                " (num_hidden_layers), each 0 or 1"
            )
        if not set(self.moe_layers) <= set(range(count)):
            raise UserError(
                f"config.json: moe_layers must name layers from 0 to {count - 1}"
                f" (num_hidden_layers={count})"
            )
        if self.floor_scale < 1:
            raise UserError(f"config.json: floor_scale={self.floor_scale} must be at least 1")
        super().check()

    def layers(self) -> tuple[LayerSpec, ...]:
        specs = windowed_layers(
            self.num_hidden_layers, self.layer_types, self.attention_chunk_size, sliding=CHUNKED
        )
        return tuple(
            dataclasses.replace(
                spec,
                kind=KINDS[bool(rotates), layer in self.moe_layers],
                rope="default" if rotates else "none",
            )
            for layer, (spec, rotates) in enumerate(zip(specs, self.no_rope_layers, strict=True))
        )

    @property
    def routing(self) -> RoutingOptions:
        return RoutingOptions(top=self.num_experts_per_tok, score="sigmoid")


class Model(Decoder):
    def make_block(self, kind: str, config: Config, options: DecoderOptions, rngs: nnx.Rngs):
        experts = functools.partial(
            experts_mlp,
            num_hidden=config.intermediate_size,
            num_shared=config.intermediate_size,
            scale_inputs=True,
        )
        rotates, bias = not kind.startswith("unrotated"), config.attention_bias
        scale = PositionScale(config.attn_scale, config.floor_scale, first=1)
        return attention_block(
            config,
            options,
            rngs,
            make_mlp=make_dense if kind.endswith("dense") else experts,
            qkv_bias=bias,
            out_bias=bias,
            adjacent=True,
            qk_norm="rotated_head" if config.use_qk_norm and rotates else None,
            norm=UnitRMSNorm,
            position_scale=scale if config.attn_temperature_tuning and not rotates else None,
        )


def make_dense(config: Config, init: LayerInit) -> GatedMLP:
    """Build the MLP of a layer without experts."""
    hidden = config.intermediate_size_mlp
    return GatedMLP(config.hidden_size, hidden, activation=config.hidden_act, init=init)


def names(config: Config) -> list[ParameterEntry]:
    """Every parameter and the tensors of a Hugging Face folder that it is made of."""
    entries, bias, hidden = outer_names(config), config.attention_bias, config.intermediate_size
    for kind, layers in config.layers_by_kind().items():
        entries += attention_names(kind, layers, qkv_bias=bias, out_bias=bias)
        if kind.endswith("dense"):
            entries += mlp_names(kind, layers, module="feed_forward")
            continue
        experts = fused_expert_names(kind, layers, hidden, module="feed_forward.", router="router")
        entries += map(transpose_experts, experts)
        for part in ("gate", "up", "down"):
            name = f"feed_forward.shared_expert.{part}_proj"
            entries += linear_entries(kind, layers, f"mlp.shared.{part}", name)
    return with_prefix(entries, config.prefix)
