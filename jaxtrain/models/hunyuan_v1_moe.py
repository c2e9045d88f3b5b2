"""Hunyuan with experts (Tencent 2025), such as Hunyuan-A13B: a shared expert beside those that are
chosen; norms on queries and keys behind the rotation."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from flax import nnx

from jaxtrain.errors import UserError
from jaxtrain.huggingface.ops import ParameterEntry
from jaxtrain.models.blocks import attention_block, experts_mlp
from jaxtrain.models.decoder import Decoder, DecoderOptions
from jaxtrain.models.experts import ExpertsConfig
from jaxtrain.models.hunyuan_v1_dense import HUB, QK_NORMS
from jaxtrain.models.naming import attention_names, expert_names, outer_names

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


class Model(Decoder):
    def make_block(self, kind: str, config: Config, options: DecoderOptions, rngs: nnx.Rngs):
        bias, hidden = config.attention_bias, config.intermediate_size
        return attention_block(
            config,
            options,
            rngs,
            qkv_bias=bias,
            out_bias=bias,
            qk_norm="rotated_head",
            make_mlp=functools.partial(
                experts_mlp, num_hidden=hidden, num_shared=hidden, wide=True
            ),
        )


def names(config: Config) -> list[ParameterEntry]:
    """Every parameter and the tensors of a Hugging Face folder that it is made of."""
    layers, bias, count = (
        range(config.num_hidden_layers),
        config.attention_bias,
        config.num_local_experts,
    )
    attention = {"qkv_bias": bias, "out_bias": bias, "qk_norm": True, "qk_norms": QK_NORMS}
    return [
        *outer_names(config),
        *attention_names("block", layers, **attention),
        *expert_names("block", layers, count, router="gate.wg", shared="shared_mlp"),
    ]
