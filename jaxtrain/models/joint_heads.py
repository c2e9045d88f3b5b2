"""Shared parts of the families around GPT-2, and of those whose queries, keys and values are one
matrix, key head by key head: GPT-NeoX, Persimmon, Falcon, GPTBigCode."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

from jaxtrain.huggingface.config import hf_defaults
from jaxtrain.huggingface.ops import ParameterEntry
from jaxtrain.layers.norm import LayerNorm, RMSNorm
from jaxtrain.models.blocks import AttentionSpec, spec_names
from jaxtrain.models.decoder_config import DecoderConfig
from jaxtrain.models.naming import linear_entries, rename_tensors, row_names

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTConfig(EqualHeadsConfig):
    """An EqualHeadsConfig with the attributes and tensors of GPT-2 and its successors."""

    final_norm_name: ClassVar[str] = "ln_f"
    renamed: ClassVar[Mapping[str, str]] = {
        "hidden_act": "activation_function",
        "hidden_size": "n_embd",
        "intermediate_size": "n_inner",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
        "rms_norm_eps": "layer_norm_epsilon",
    }
    prefix: ClassVar[str] = "transformer."

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        inner = cls.renamed.get("intermediate_size", "intermediate_size")
        if raw.get(inner) is None:
            name = cls.renamed.get("hidden_size", "hidden_size")
            width = raw.get(name, raw.get("hidden_size", hf_defaults(cls.model_type)[name]))
            raw = {**raw, inner: 4 * width if isinstance(width, int) else None}
        return super().from_hf(raw)

    def to_hf(self) -> dict[str, Any]:
        raw = super().to_hf()
        if self.intermediate_size == 4 * self.hidden_size:
            raw[self.renamed.get("intermediate_size", "intermediate_size")] = None
        return raw


def gpt_names(config: GPTConfig) -> list[ParameterEntry]:
    """Every parameter of a SpecDecoder of a GPTConfig and the tensors that it is made of."""

    def rename(name: str) -> str:
        name = name.replace("layers.", "h.", 1).replace(".self_attn.", ".attn.")
        return name.replace("embed_tokens.", "wte.").replace("embed_positions.", "wpe.")

    return rename_tensors(spec_names(config), rename)
