"""AFMoE (Arcee 2025), the Trinity models: experts chosen by sigmoids, gated attention, norms before
and behind both layers of a block; only layers with a window are rotated."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from flax import nnx

from jaxtrain.huggingface.ops import ParameterEntry
from jaxtrain.layers.mixer import LayerSpec
from jaxtrain.layers.router import RoutingOptions
from jaxtrain.models.blocks import attention_block, dense_mlp, experts_mlp
from jaxtrain.models.decoder import Decoder, DecoderOptions
from jaxtrain.models.experts import ExpertsConfig
from jaxtrain.models.naming import attention_names, expert_names, mlp_names, outer_names
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


class Model(Decoder):
    def make_block(self, kind: str, config: Config, options: DecoderOptions, rngs: nnx.Rngs):
        experts = functools.partial(
            experts_mlp,
            num_hidden=config.moe_intermediate_size,
            num_shared=config.shared_width,
            choice_bias=True,
        )
        bias = config.attention_bias
        return attention_block(
            config,
            options,
            rngs,
            qkv_bias=bias,
            out_bias=bias,
            qk_norm="head",
            output_gate="own",
            norms=NORMS,
            make_mlp=dense_mlp if kind == "dense" else experts,
        )


def names(config: Config) -> list[ParameterEntry]:
    """Every parameter and the tensors of a Hugging Face folder that it is made of."""
    entries, bias, count = outer_names(config), config.attention_bias, config.num_local_experts
    experts = {
        "router": "router.gate",
        "choice_bias": "expert_bias",
        "shared": "shared_experts" if config.shared_width else None,
    }
    for kind, layers in config.layers_by_kind().items():
        biases = {"qkv_bias": bias, "out_bias": bias}
        entries += attention_names(
            kind, layers, qk_norm=True, gate="gate_proj", norms=NORMS, **biases
        )
        if kind == "dense":
            entries += mlp_names(kind, layers)
        else:
            entries += expert_names(kind, layers, count, **experts)
    return entries
