"""Phi-3 and Phi-4 (Abdin et al. 2024, arXiv:2404.14219, arXiv:2412.08905): Llama with queries,
keys and values in one matrix, gate and up in another, and LongRoPE."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from jaxtrain.huggingface.ops import ParameterEntry
from jaxtrain.layers.mixer import LayerSpec
from jaxtrain.models.blocks import AttentionSpec, BlockSpec, DenseSpec, SpecDecoder, spec_names
from jaxtrain.models.decoder_config import DecoderConfig
from jaxtrain.models.naming import joint_names, linear_entries


class JointSpec(AttentionSpec):
    """Attention whose queries, keys and values are one tensor."""

    def projection_names(
        self, config: Any, kind: str, layers: Sequence[int]
    ) -> list[ParameterEntry]:
        heads = {"q": config.num_attention_heads} | dict.fromkeys("kv", config.num_key_value_heads)
        sizes = {f"attention.{part}": count * config.head_size for part, count in heads.items()}
        return [
            *joint_names(kind, layers, "self_attn.qkv_proj", sizes),
            *linear_entries(kind, layers, "attention.out", "self_attn.o_proj"),
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    architecture: ClassVar[str] = "Phi3ForCausalLM"
    model_type: ClassVar[str] = "phi3"
    rope_keys: ClassVar[tuple[str, ...]] = ("partial_rotary_factor",)
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "full_attn_mod": (1,),
        "interpolate_factor": (1,),
    }

    original_max_position_embeddings: int
    """Texts of up to so many tokens are what the model knew before it was made longer."""
    sliding_window: int | None = None
    """Of all layers."""

    def layers(self) -> tuple[LayerSpec, ...]:
        return (LayerSpec(window=self.sliding_window),) * self.num_hidden_layers

    def block_spec(self, kind: str) -> BlockSpec:
        return BlockSpec(JointSpec(), DenseSpec(joint=True))


Model, names = SpecDecoder, spec_names
