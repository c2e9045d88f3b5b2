"""Hunyuan dense (Tencent 2025): Llama with norms on queries and keys behind the rotation."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from jaxtrain.models.blocks import AttentionSpec, BlockSpec, SpecDecoder, spec_names
from jaxtrain.models.decoder_config import DecoderConfig

QK_NORMS = ("query_layernorm", "key_layernorm")
HUB: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("attention_head_dim", "cla_share_factor", "class_num", "dense_list"), ()),
    **dict.fromkeys(("eod_token_id", "im_start_id", "im_end_id", "im_newline_id"), ()),
    **dict.fromkeys(("mask_init_id", "pad_id", "sep_id", "text_start_id", "text_end_id"), ()),
    **dict.fromkeys(("org_vocab_size", "pool_type", "video_start_id", "video_end_id"), ()),
    "norm_type": ("rms", "hf_rms"),
    "use_qk_norm": (True,),
    "use_rotary_pos_emb": (True,),
}
"""What the family's files on the Hub say beside what transformers reads."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    architecture: ClassVar[str] = "HunYuanDenseV1ForCausalLM"
    model_type: ClassVar[str] = "hunyuan_v1_dense"
    rope_keys: ClassVar[tuple[str, ...]] = ("alpha",)
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {**HUB, "num_experts": (1,)}

    attention_bias: bool = False
    """On all four projections."""

    def block_spec(self, kind: str) -> BlockSpec:
        bias = self.attention_bias
        attention = AttentionSpec(
            qkv_bias=bias, out_bias=bias, qk_norm="rotated_head", qk_norm_names=QK_NORMS
        )
        return BlockSpec(attention)


Model, names = SpecDecoder, spec_names
