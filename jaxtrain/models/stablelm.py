"""StableLM 2 (Bellagente et al. 2024, arXiv:2402.17834): LayerNorm, a quarter of each head rotated,
and where the config says so, attention and MLP side by side."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from jaxtrain.layers.norm import LayerNorm, RMSNorm
from jaxtrain.models.blocks import AttentionSpec, BlockSpec, SpecDecoder, spec_names
from jaxtrain.models.decoder_config import DecoderConfig
from jaxtrain.models.naming import PRE_NORMS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    architecture: ClassVar[str] = "StableLmForCausalLM"
    model_type: ClassVar[str] = "stablelm"
    renamed: ClassVar[Mapping[str, str]] = {"rms_norm_eps": "layer_norm_eps"}
    rope_keys: ClassVar[tuple[str, ...]] = ("partial_rotary_factor",)
    norm: ClassVar[type[RMSNorm]] = LayerNorm

    use_qkv_bias: bool = False
    use_parallel_residual: bool = False
    """Attention and MLP read one norm, and their sum is added."""

    @property
    def block_norms(self) -> dict[str, str]:
        """The norms of a block and what they are called there."""
        parallel = self.use_parallel_residual
        return {"attention_norm": PRE_NORMS["attention_norm"]} if parallel else PRE_NORMS

    def block_spec(self, kind: str) -> BlockSpec:
        return BlockSpec(
            AttentionSpec(qkv_bias=self.use_qkv_bias),
            norms=self.block_norms,
            parallel=self.use_parallel_residual,
        )


Model, names = SpecDecoder, spec_names
