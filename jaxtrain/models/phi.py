"""Phi-1, Phi-1.5 and Phi-2 (Li et al. 2023, arXiv:2309.05463): attention and MLP side by side
behind one LayerNorm, an MLP without a gate, a part of each head rotated, biases everywhere."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from jaxtrain.layers.norm import LayerNorm, RMSNorm
from jaxtrain.models.blocks import AttentionSpec, BlockSpec, DenseSpec, SpecDecoder, spec_names
from jaxtrain.models.decoder_config import DecoderConfig
from jaxtrain.models.naming import PRE_NORMS

PARTS = {"up": "fc1", "down": "fc2"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    architecture: ClassVar[str] = "PhiForCausalLM"
    model_type: ClassVar[str] = "phi"
    final_norm_name: ClassVar[str] = "final_layernorm"
    renamed: ClassVar[Mapping[str, str]] = {"rms_norm_eps": "layer_norm_eps"}
    rope_keys: ClassVar[tuple[str, ...]] = ("partial_rotary_factor",)
    norm: ClassVar[type[RMSNorm]] = LayerNorm

    qk_layernorm: bool = False
    """A norm over each head's queries and keys."""

    @property
    def head_bias(self) -> bool:
        return True

    def block_spec(self, kind: str) -> BlockSpec:
        attention = AttentionSpec(
            qkv_bias=True,
            out_bias=True,
            out_name="dense",
            qk_norm="head" if self.qk_layernorm else None,
            qk_norm_names=("q_layernorm", "k_layernorm"),
        )
        norms = {"attention_norm": PRE_NORMS["attention_norm"]}
        return BlockSpec(attention, DenseSpec(bias=True, parts=PARTS), norms=norms, parallel=True)


Model, names = SpecDecoder, spec_names
