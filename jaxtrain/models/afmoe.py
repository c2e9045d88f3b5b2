"""AFMoE (Arcee 2025), the Trinity models: experts chosen by sigmoids, gated attention, norms before
and behind both layers of a block; only layers with a window are rotated."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from jaxtrain.layers.mixer import LayerSpec
from jaxtrain.layers.router import RoutingOptions
from jaxtrain.models.blocks import AttentionSpec, BlockSpec, ExpertsSpec, SpecDecoder, spec_names
from jaxtrain.models.experts import ExpertsConfig
from jaxtrain.models.windows import unrotated, windowed_layers

NORMS = {
    "attention_norm": "input_layernorm",
    "attention_out_norm": "post_attention_layernorm",
    "mlp_norm": "pre_mlp_layernorm",
    "mlp_out_norm": "post_mlp_layernorm",
}


ROUTER_KEYS = ("n_group", "route_norm", "score_func", "topk_group")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(ExpertsConfig):
    architecture: ClassVar[str] = "AfmoeForCausalLM"
    model_type: ClassVar[str] = "afmoe"
    renamed: ClassVar[Mapping[str, str]] = {"num_local_experts": "num_experts"}
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "load_balance_coeff": (),
        "n_group": (1,),
        "num_expert_groups": (1,),
        "num_limited_groups": (1,),
        "route_norm": (True,),
        "score_func": ("sigmoid",),
        "topk_group": (1,),
        "use_grouped_mm": (),
    }

    moe_intermediate_size: int
    """F of an expert; intermediate_size is that of a dense layer."""
    num_dense_layers: int = 0
    """How many of the first layers are dense."""
    num_shared_experts: int = 0
    """Experts that every token goes through: one MLP of so many times F."""
    route_scale: float = 1.0
    """Of gates, once they sum to 1."""
    sliding_window: int | None = None
    global_attn_every_n_layers: int | None = None
    layer_types: tuple[str, ...] | None = None
    """Which layers slide; transformers derives it from global_attn_every_n_layers where it is
    absent."""
    mup_enabled: bool = False
    """Embeddings times the root of hidden_size."""
    attention_bias: bool = False
    """On all four projections."""

    def layers(self) -> tuple[LayerSpec, ...]:
        windows = windowed_layers(self.num_hidden_layers, self.layer_types, self.sliding_window)
        return tuple(
            dataclasses.replace(spec, kind="dense" if layer < self.num_dense_layers else "block")
            for layer, spec in enumerate(unrotated(windows))
        )

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        """With what published folders say and vLLM asks for; transformers' own need not."""
        return super().from_hf({key: cls.fixed[key][0] for key in ROUTER_KEYS} | dict(raw))

    @property
    def embedding_scale(self) -> float:
        return math.sqrt(self.hidden_size) if self.mup_enabled else 1.0

    @property
    def routing(self) -> RoutingOptions:
        top, scale = self.num_experts_per_tok, self.route_scale
        return RoutingOptions(top=top, score="sigmoid", normalize=True, scale=scale)

    @property
    def shared_width(self) -> int | None:
        """F of the MLP that all tokens go through."""
        count = self.num_shared_experts
        return self.moe_intermediate_size * count if count else None

    @property
    def experts_spec(self) -> ExpertsSpec:
        return ExpertsSpec(
            hidden=self.moe_intermediate_size,
            num_shared=self.shared_width,
            router="router.gate",
            choice_bias="expert_bias",
        )

    def block_spec(self, kind: str) -> BlockSpec:
        bias = self.attention_bias
        attention = AttentionSpec(qkv_bias=bias, out_bias=bias, qk_norm="head", output_gate="own")
        return BlockSpec(attention, self.mlp_spec(kind), norms=NORMS)


Model, names = SpecDecoder, spec_names
