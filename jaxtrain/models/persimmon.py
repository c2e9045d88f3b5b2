"""Persimmon (Adept 2023): LayerNorm, on each head's queries and keys, too, half of a head rotated,
and an MLP without a gate behind a squared ReLU."""

import dataclasses
from typing import ClassVar

from jaxtrain.models.blocks import BlockSpec, DenseSpec, SpecDecoder, spec_names
from jaxtrain.models.joint_heads import PARTS, EqualHeadsConfig, JointHeadsSpec

QK_NORMS = ("q_layernorm", "k_layernorm")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(EqualHeadsConfig):
    architecture: ClassVar[str] = "PersimmonForCausalLM"
    model_type: ClassVar[str] = "persimmon"
    final_norm_name: ClassVar[str] = "final_layernorm"

    qk_layernorm: bool = True
    """A norm over each head's queries and keys."""

    def block_spec(self, kind: str) -> BlockSpec:
        norm = "head" if self.qk_layernorm else None
        attention = JointHeadsSpec(
            qkv_bias=True, out_bias=True, qk_norm=norm, qk_norm_names=QK_NORMS
        )
        return BlockSpec(attention, DenseSpec(bias=True, parts=PARTS))


Model, names = SpecDecoder, spec_names
