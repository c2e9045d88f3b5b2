"""OLMo (OLMo team 2024, arXiv:2402.00838): Llama with LayerNorm without weights, and queries, keys
and values held within a limit."""

import dataclasses
from typing import Any, ClassVar

from flax import nnx

from jaxtrain.huggingface.ops import ParameterEntry
from jaxtrain.layers.norm import RMSNorm, UnitLayerNorm
from jaxtrain.models.blocks import attention_block
from jaxtrain.models.decoder import Decoder, DecoderOptions
from jaxtrain.models.decoder_config import DecoderConfig
from jaxtrain.models.naming import decoder_names


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


class Model(Decoder):
    def make_block(self, kind: str, config: Config, options: DecoderOptions, rngs: nnx.Rngs):
        bias, clip = config.attention_bias, config.clip_qkv
        return attention_block(config, options, rngs, qkv_bias=bias, out_bias=bias, clip=clip)


def names(config: Config) -> list[ParameterEntry]:
    """Every parameter and the tensors of a Hugging Face folder that it is made of."""
    return decoder_names(config, qkv_bias=config.attention_bias, out_bias=config.attention_bias)
