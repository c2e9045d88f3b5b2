"""Gemma 2 (Gemma Team 2024, arXiv:2408.00118): norms before and behind both layers, a window in
every second one, scores and logits held within a softcap."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from flax import nnx

from jaxtrain.huggingface.ops import ParameterEntry
from jaxtrain.layers.mixer import LayerSpec
from jaxtrain.layers.norm import RMSNorm, ZeroCenteredRMSNorm
from jaxtrain.models.blocks import attention_block
from jaxtrain.models.decoder import Decoder, DecoderOptions
from jaxtrain.models.decoder_config import DecoderConfig
from jaxtrain.models.naming import SANDWICH_NORMS, decoder_names
from jaxtrain.models.windows import windowed_layers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    architecture: ClassVar[str] = "Gemma2ForCausalLM"
    model_type: ClassVar[str] = "gemma2"
    renamed: ClassVar[Mapping[str, str]] = {"hidden_act": "hidden_activation"}
    norm: ClassVar[type[RMSNorm]] = ZeroCenteredRMSNorm
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "cache_implementation": ("hybrid",),
        "hidden_act": ("gelu_pytorch_tanh",),
    }

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


class Model(Decoder):
    norms: ClassVar[Mapping[str, str]] = SANDWICH_NORMS
    """Of a block."""

    def make_block(self, kind: str, config: Config, options: DecoderOptions, rngs: nnx.Rngs):
        bias = config.attention_bias
        return attention_block(
            config,
            options,
            rngs,
            norms=self.norms,
            qkv_bias=bias,
            out_bias=bias,
            scale=config.query_pre_attn_scalar**-0.5,
            softcap=config.attn_logit_softcapping,
        )


def names(config: Config) -> list[ParameterEntry]:
    """Every parameter and the tensors of a Hugging Face folder that it is made of."""
    bias = config.attention_bias
    return decoder_names(config, qkv_bias=bias, out_bias=bias, norms=SANDWICH_NORMS)
