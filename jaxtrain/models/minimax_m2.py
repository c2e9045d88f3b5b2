"""MiniMax-M2 (MiniMax 2025): experts chosen by sigmoids in every layer; queries and keys are normed
over all heads, and a part of their dims is rotated."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from jaxtrain.errors import UserError
from jaxtrain.layers.router import RoutingOptions
from jaxtrain.models.blocks import AttentionSpec, BlockSpec, ExpertsSpec, SpecDecoder, spec_names
from jaxtrain.models.experts import ExpertsConfig
from jaxtrain.models.naming import NUMBERED_PARTS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(ExpertsConfig):
    architecture: ClassVar[str] = "MiniMaxM2ForCausalLM"
    model_type: ClassVar[str] = "minimax_m2"
    rope_keys: ClassVar[tuple[str, ...]] = ("partial_rotary_factor",)
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "qk_norm_type": ("per_layer",),
        "scoring_func": ("sigmoid",),
        "use_qk_norm": (True,),
        "use_routing_bias": (True,),
        "shared_intermediate_size": (0,),
        **dict.fromkeys(
            (
                *("attn_type_list", "layernorm_full_attention_beta"),
                *("layernorm_linear_attention_beta", "layernorm_mlp_beta"),
                *("mlp_intermediate_size", "mtp_transformer_layers", "num_mtp_modules"),
                *("rotary_dim", "shared_moe_mode", "use_mtp"),
            ),
            (),
        ),
    }

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        raw = dict(raw)
        if set(raw.get("attn_type_list") or [1]) != {1}:
            raise UserError("config.json: attn_type_list may only hold 1, full attention")
        dims, size = raw.get("rotary_dim"), raw.get("head_dim") or 128
        stated = raw.get("rope_parameters") or {}
        if type(dims) is int and "partial_rotary_factor" not in {*raw, *stated}:
            raw["partial_rotary_factor"] = dims / size
        # Published folders say these and vLLM asks for them; transformers' own need not.
        raw.setdefault("scoring_func", "sigmoid")
        raw.setdefault("use_routing_bias", True)
        config = super().from_hf(raw)
        share = dict(config.rope).get("partial_rotary_factor")
        if "rotary_dim" in raw or share is None:
            return config
        rotated = ("rotary_dim", json.dumps(int(size * share)))
        return dataclasses.replace(
            config, fixed_attributes=tuple(sorted([*config.fixed_attributes, rotated]))
        )

    @property
    def routing(self) -> RoutingOptions:
        return RoutingOptions(top=self.num_experts_per_tok, score="sigmoid", normalize=True)

    @property
    def experts_spec(self) -> ExpertsSpec:
        return ExpertsSpec(
            hidden=self.intermediate_size,
            module="block_sparse_moe",
            parts=NUMBERED_PARTS,
            choice_bias="e_score_correction_bias",
        )

    def block_spec(self, kind: str) -> BlockSpec:
        return BlockSpec(AttentionSpec(qk_norm="all_heads"), self.experts_spec)


Model, names = SpecDecoder, spec_names
