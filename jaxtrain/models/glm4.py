"""GLM-4-0414 dense (Zhipu 2025): norms around attention and MLP, half of each head rotated in pairs
of adjacent dims."""

import dataclasses
from typing import ClassVar

from jaxtrain.models.blocks import AttentionSpec, BlockSpec, DenseSpec, SpecDecoder, spec_names
from jaxtrain.models.decoder_config import DecoderConfig

NORMS = {
    "attention_norm": "input_layernorm",
    "attention_out_norm": "post_self_attn_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "mlp_out_norm": "post_mlp_layernorm",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    architecture: ClassVar[str] = "Glm4ForCausalLM"
    model_type: ClassVar[str] = "glm4"
    rope_keys: ClassVar[tuple[str, ...]] = ("partial_rotary_factor",)

    attention_bias: bool = True
    """On queries, keys and values."""

    def block_spec(self, kind: str) -> BlockSpec:
        attention = AttentionSpec(qkv_bias=self.attention_bias, adjacent=True)
        return BlockSpec(attention, DenseSpec(joint=True), norms=NORMS)


Model, names = SpecDecoder, spec_names
