"""Hunyuan with experts (Tencent 2025), such as Hunyuan-A13B: a shared expert beside those that are
chosen; norms on queries and keys behind the rotation."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from jaxtrain.errors import UserError
from jaxtrain.models.blocks import AttentionSpec, BlockSpec, ExpertsSpec, SpecDecoder, spec_names
from jaxtrain.models.experts import ExpertsConfig
from jaxtrain.models.hunyuan_v1_dense import HUB, QK_NORMS

BY_LAYER = ("num_experts", "moe_topk", "moe_intermediate_size", "num_shared_expert")
"""Attributes that may be a list, a number a layer, all of which must be one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(ExpertsConfig):
    """F of an expert, and of the shared one, is intermediate_size."""

    architecture: ClassVar[str] = "HunYuanMoEV1ForCausalLM"
    model_type: ClassVar[str] = "hunyuan_v1_moe"
    renamed: ClassVar[Mapping[str, str]] = {
        "num_local_experts": "num_experts",
        "num_experts_per_tok": "moe_topk",
    }
    rope_keys: ClassVar[tuple[str, ...]] = ("alpha",)
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **HUB,
        "moe_intermediate_size": (),
        "moe_layer_num_skipped": (0,),
        "norm_topk_prob": (True,),
        "num_shared_expert": (1,),
        "use_mixed_mlp_moe": (True,),
    }

    attention_bias: bool = False
    """On all four projections."""
    sep_token_id: int | None = None
    """Only carried along."""

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        raw = dict(raw)
        for key in BY_LAYER:
            by_layer = raw.get(key)
            if isinstance(by_layer, list) and by_layer:
                if any(value != by_layer[0] for value in by_layer):
                    raise UserError(
                        f"config.json: {key} differs from layer to layer; only one number for all"
                        " of them is supported"
                    )
                raw[key] = by_layer[0]
        for key, same in (
            ("moe_intermediate_size", raw.get("intermediate_size")),
            ("attention_head_dim", raw.get("head_dim")),
        ):
            if raw.get(key) is not None and same is not None and raw[key] != same:
                raise UserError(
                    f"config.json: {key}={raw[key]} must be {same}, as transformers reads"
                )
        return super().from_hf(raw)

    @property
    def experts_spec(self) -> ExpertsSpec:
        hidden = self.intermediate_size
        return ExpertsSpec(
            hidden=hidden, num_shared=hidden, shared_name="shared_mlp", router="gate.wg", wide=True
        )

    def block_spec(self, kind: str) -> BlockSpec:
        bias = self.attention_bias
        attention = AttentionSpec(
            qkv_bias=bias, out_bias=bias, qk_norm="rotated_head", qk_norm_names=QK_NORMS
        )
        return BlockSpec(attention, self.experts_spec)


Model, names = SpecDecoder, spec_names
