"""Shared parts of the families whose queries, keys and values are one matrix, key head by key head:
GPT-NeoX, Persimmon, Falcon."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

from jaxtrain.huggingface.config import hf_defaults
from jaxtrain.huggingface.ops import ParameterEntry
from jaxtrain.layers.norm import LayerNorm, RMSNorm
from jaxtrain.models.blocks import AttentionSpec
from jaxtrain.models.decoder_config import DecoderConfig
from jaxtrain.models.naming import linear_entries, row_names

PARTS = {"up": "dense_h_to_4h", "down": "dense_4h_to_h"}


class JointHeadsSpec(AttentionSpec):
    """Attention whose queries, keys and values are one tensor, key head by key head."""

    def projection_names(
        self, config: Any, kind: str, layers: Sequence[int]
    ) -> list[ParameterEntry]:
        num_kv_heads, dims = self.kv_heads or config.num_key_value_heads, config.head_size
        width = config.num_attention_heads // num_kv_heads * dims
        parts = {"q": (0, width), "k": (width, dims), "v": (width + dims, dims)}
        runs = {
            f"attention.{part}": tuple(
                (group * (width + 2 * dims) + start, size) for group in range(num_kv_heads)
            )
            for part, (start, size) in parts.items()
        }
        name = "self_attn.query_key_value"
        return [
            *row_names(kind, layers, name, runs, bias=self.qkv_bias),
            *linear_entries(kind, layers, "attention.out", "self_attn.dense", bias=self.out_bias),
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EqualHeadsConfig(DecoderConfig):
    """A DecoderConfig whose query heads all have a key head of their own, behind LayerNorm."""

    renamed: ClassVar[Mapping[str, str]] = {"rms_norm_eps": "layer_norm_eps"}
    rope_keys: ClassVar[tuple[str, ...]] = ("partial_rotary_factor",)
    norm: ClassVar[type[RMSNorm]] = LayerNorm

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        name = cls.renamed.get("num_attention_heads", "num_attention_heads")
        stated = (raw.get(key) for key in ("num_attention_heads", name))
        count = next((value for value in stated if value is not None), None)
        if count is None:
            count = hf_defaults(cls.model_type)[name]
        return super().from_hf({**raw, "num_key_value_heads": count})

    def to_hf(self) -> dict[str, Any]:
        raw = super().to_hf()
        del raw["num_key_value_heads"]
        return raw
