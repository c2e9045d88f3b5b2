"""Phi-3 and Phi-4 (Abdin et al. 2024, arXiv:2404.14219, arXiv:2412.08905): Llama with queries,
keys and values in one matrix, gate and up in another, and LongRoPE."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from flax import nnx

from jaxtrain.huggingface.ops import ParameterEntry
from jaxtrain.layers.mixer import LayerSpec
from jaxtrain.models.blocks import attention_block
from jaxtrain.models.decoder import Decoder, DecoderOptions
from jaxtrain.models.decoder_config import DecoderConfig
from jaxtrain.models.naming import (
    joint_mlp_names,
    joint_names,
    linear_entries,
    norm_names,
    outer_names,
)


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


class Model(Decoder):
    def make_block(self, kind: str, config: Config, options: DecoderOptions, rngs: nnx.Rngs):
        return attention_block(config, options, rngs)


def names(config: Config) -> list[ParameterEntry]:
    """Every parameter and the tensors of a Hugging Face folder that it is made of."""
    kind, layers = "block", range(config.num_hidden_layers)
    heads = {"q": config.num_attention_heads} | dict.fromkeys("kv", config.num_key_value_heads)
    sizes = {f"attention.{part}": count * config.head_size for part, count in heads.items()}
    return [
        *outer_names(config),
        *norm_names(kind, layers),
        *joint_names(kind, layers, "self_attn.qkv_proj", sizes),
        *linear_entries(kind, layers, "attention.out", "self_attn.o_proj"),
        *joint_mlp_names(kind, layers, config.intermediate_size),
    ]
