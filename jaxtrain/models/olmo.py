"""OLMo (OLMo team 2024, arXiv:2402.00838): Llama with LayerNorm without weights, and queries, keys
and values held within a limit."""

import dataclasses
from typing import Any, ClassVar

from jaxtrain.layers.norm import RMSNorm, UnitLayerNorm
from jaxtrain.models.blocks import AttentionSpec, BlockSpec, SpecDecoder, spec_names
from jaxtrain.models.decoder_config import DecoderConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    architecture: ClassVar[str] = "OlmoForCausalLM"
    model_type: ClassVar[str] = "olmo"
    norm: ClassVar[type[RMSNorm]] = UnitLayerNorm

    rms_norm_eps: float = 1e-5
    """Of the family; no attribute of its files."""
    attention_bias: bool = False
    """On all four projections."""
    clip_qkv: float | None = None
    """Queries, keys and values beyond it, either way, become it."""

    def to_hf(self) -> dict[str, Any]:
        raw = super().to_hf()
        del raw["rms_norm_eps"]
        return raw

    def block_spec(self, kind: str) -> BlockSpec:
        bias = self.attention_bias
        return BlockSpec(AttentionSpec(qkv_bias=bias, out_bias=bias, clip=self.clip_qkv))


Model, names = SpecDecoder, spec_names
