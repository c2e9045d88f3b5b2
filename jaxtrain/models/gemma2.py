"""Gemma 2 (Gemma Team 2024, arXiv:2408.00118): norms before and behind both layers, a window in
every second one, scores and logits held within a softcap."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from jaxtrain.layers.mixer import LayerSpec
from jaxtrain.layers.norm import RMSNorm, ZeroCenteredRMSNorm
from jaxtrain.models.blocks import AttentionSpec, BlockSpec, SpecDecoder, spec_names
from jaxtrain.models.decoder_config import DecoderConfig
from jaxtrain.models.naming import SANDWICH_NORMS
from jaxtrain.models.windows import windowed_layers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    architecture: ClassVar[str] = "Gemma2ForCausalLM"
    model_type: ClassVar[str] = "gemma2"
    renamed: ClassVar[Mapping[str, str]] = {"hidden_act": "hidden_activation"}
    norm: ClassVar[type[RMSNorm]] = ZeroCenteredRMSNorm
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "cache_implementation": ("hybrid",),
        "hidden_act": (),  # transformers reads hidden_activation alone
    }

    block_norms: ClassVar[Mapping[str, str]] = SANDWICH_NORMS
    """The norms of a block and what they are called there."""
    attention_bias: bool = False
    """On all four projections."""
    query_pre_attn_scalar: int
    """Scores are multiplied with its root's inverse."""
    layer_types: tuple[str, ...]
    sliding_window: int
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None

    def layers(self) -> tuple[LayerSpec, ...]:
        return windowed_layers(self.num_hidden_layers, self.layer_types, self.sliding_window)

    @property
    def embedding_scale(self) -> float:
        return self.hidden_size**0.5

    @property
    def logit_softcap(self) -> float | None:
        return self.final_logit_softcapping

    def block_spec(self, kind: str) -> BlockSpec:
        bias = self.attention_bias
        scale, softcap = self.query_pre_attn_scalar**-0.5, self.attn_logit_softcapping
        attention = AttentionSpec(qkv_bias=bias, out_bias=bias, scale=scale, softcap=softcap)
        return BlockSpec(attention, norms=self.block_norms)


Model, names = SpecDecoder, spec_names
