"""Qwen3 dense (Yang et al. 2025, arXiv:2505.09388): RMSNorm on queries and keys, no biases."""

import dataclasses
from typing import ClassVar

from flax import nnx

from jaxtrain.huggingface.ops import ParameterEntry
from jaxtrain.layers.mixer import LayerSpec
from jaxtrain.models.blocks import attention_block
from jaxtrain.models.decoder import Decoder, DecoderOptions
from jaxtrain.models.decoder_config import DecoderConfig
from jaxtrain.models.naming import decoder_names
from jaxtrain.models.windows import windowed_layers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    architecture: ClassVar[str] = "Qwen3ForCausalLM"
    model_type: ClassVar[str] = "qwen3"

    attention_bias: bool = False
    """On all four projections."""
    use_sliding_window: bool = False
    sliding_window: int | None = None
    max_window_layers: int = 0
    layer_types: tuple[str, ...] | None = None
    """Which layers slide; transformers derives it from max_window_layers where it is absent."""

    def layers(self) -> tuple[LayerSpec, ...]:
        return windowed_layers(self.num_hidden_layers, self.layer_types, self.sliding_window)


class Model(Decoder):
    def make_block(self, kind: str, config: Config, options: DecoderOptions, rngs: nnx.Rngs):
        bias = config.attention_bias
        return attention_block(config, options, rngs, qkv_bias=bias, out_bias=bias, qk_norm="head")


def names(config: Config) -> list[ParameterEntry]:
    """Every parameter and the tensors of a Hugging Face folder that it is made of."""
    bias = config.attention_bias
    return decoder_names(config, qkv_bias=bias, out_bias=bias, qk_norm=True)
