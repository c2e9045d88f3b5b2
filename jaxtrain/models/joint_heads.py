"""Shared parts of the families whose queries, keys and values are one matrix, key head by key head:
GPT-NeoX, Persimmon, Falcon."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

from jaxtrain.huggingface.config import hf_defaults
from jaxtrain.huggingface.ops import ParameterEntry
from jaxtrain.layers.norm import LayerNorm, RMSNorm
from jaxtrain.models.decoder_config import DecoderConfig
from jaxtrain.models.naming import linear_entries, mlp_names, row_names

PARTS = {"up": "dense_h_to_4h", "down": "dense_4h_to_h"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class EqualHeadsConfig(DecoderConfig):
    """A DecoderConfig whose query heads all have a key head of their own, behind LayerNorm."""

    renamed: ClassVar[Mapping[str, str]] = {"rms_norm_eps": "layer_norm_eps"}
    rope_keys: ClassVar[tuple[str, ...]] = ("partial_rotary_factor",)
    norm: ClassVar[type[RMSNorm]] = LayerNorm

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        count = raw.get("num_attention_heads")
        if count is None:
            count = hf_defaults(cls.model_type)["num_attention_heads"]
        return super().from_hf({**raw, "num_key_value_heads": count})

    def to_hf(self) -> dict[str, Any]:
        raw = super().to_hf()
        del raw["num_key_value_heads"]
        return raw


def joint_head_names(
    kind: str,
    layers: Sequence[int],
    heads: tuple[int, int, int],
    *,
    qkv_bias: bool,
    out_bias: bool,
    mlp_bias: bool,
) -> list[ParameterEntry]:
    """Entries of all matrices of the layers; heads: (query heads, key heads, dims of a head)."""
    num_heads, num_kv_heads, dims = heads
    width = num_heads // num_kv_heads * dims
    parts = {"q": (0, width), "k": (width, dims), "v": (width + dims, dims)}
    runs = {
        f"attention.{part}": tuple(
            (group * (width + 2 * dims) + start, size) for group in range(num_kv_heads)
        )
        for part, (start, size) in parts.items()
    }
    return [
        *row_names(kind, layers, "self_attn.query_key_value", runs, bias=qkv_bias),
        *linear_entries(kind, layers, "attention.out", "self_attn.dense", bias=out_bias),
        *mlp_names(kind, layers, bias=mlp_bias, parts=PARTS),
    ]
