"""Llama 4 (Meta 2025): an expert beside a shared one in all or every other layer, attention in
chunks, and layers that rotate nothing, whose queries grow with their position.

Published folders are multimodal; their vision tower is carried along."""

import dataclasses
from typing import Any, ClassVar

from jaxtrain.errors import UserError
from jaxtrain.layers.mixer import LayerSpec
from jaxtrain.layers.norm import UnitRMSNorm
from jaxtrain.layers.rope import PositionScale
from jaxtrain.layers.router import RoutingOptions
from jaxtrain.models.blocks import AttentionSpec, BlockSpec, DenseSpec, SpecDecoder, spec_names
from jaxtrain.models.experts import ExpertsConfig, FusedExpertsSpec
from jaxtrain.models.multimodal import TextConfig
from jaxtrain.models.windows import CHUNKED, windowed_layers

MODULE = "feed_forward"
"""Name of MLP and experts."""
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

    @property
    def experts_spec(self) -> FusedExpertsSpec:
        return FusedExpertsSpec(
            hidden=self.intermediate_size,
            num_shared=self.intermediate_size,
            shared_name="shared_expert",
            scale_inputs=True,
            module=MODULE,
            router="router",
            swapped=True,
        )

    def block_spec(self, kind: str) -> BlockSpec:
        rotates, bias = not kind.startswith("unrotated"), self.attention_bias
        scale = PositionScale(self.attn_scale, self.floor_scale, first=1)
        attention = AttentionSpec(
            qkv_bias=bias,
            out_bias=bias,
            adjacent=True,
            qk_norm="rotated_head" if self.use_qk_norm and rotates else None,
            norm=UnitRMSNorm,
            position_scale=scale if self.attn_temperature_tuning and not rotates else None,
        )
        dense = DenseSpec(hidden=self.intermediate_size_mlp, module=MODULE)
        return BlockSpec(attention, dense if kind.endswith("dense") else self.experts_spec)


Model, names = SpecDecoder, spec_names
