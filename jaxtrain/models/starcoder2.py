"""StarCoder2 (Lozhkov et al. 2024, arXiv:2402.19173): LayerNorm, an MLP without a gate, biases
everywhere, and perhaps a sliding window."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar

from flax import nnx

from jaxtrain.huggingface.ops import ParameterEntry
from jaxtrain.layers.mixer import LayerSpec
from jaxtrain.layers.norm import LayerNorm, RMSNorm
from jaxtrain.models.blocks import attention_block, plain_mlp
from jaxtrain.models.decoder import Decoder, DecoderOptions
from jaxtrain.models.decoder_config import DecoderConfig
from jaxtrain.models.naming import decoder_names

PARTS = {"up": "c_fc", "down": "c_proj"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    architecture: ClassVar[str] = "Starcoder2ForCausalLM"
    model_type: ClassVar[str] = "starcoder2"
    renamed: ClassVar[Mapping[str, str]] = {"rms_norm_eps": "norm_epsilon"}
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "activation_function": ("gelu_pytorch_tanh",),
        "layer_norm_epsilon": (),
        "mlp_type": ("default",),
        "norm_type": ("layer_norm",),
        "scale_attention_softmax_in_fp32": (),
        "scale_attn_weights": (True,),
    }
    norm: ClassVar[type[RMSNorm]] = LayerNorm

    use_bias: bool = True
    """On all matrices of a layer."""
    sliding_window: int | None = None

    def layers(self) -> tuple[LayerSpec, ...]:
        return (LayerSpec(window=self.sliding_window),) * self.num_hidden_layers


class Model(Decoder):
    def make_block(self, kind: str, config: Config, options: DecoderOptions, rngs: nnx.Rngs):
        bias = config.use_bias
        make_mlp = functools.partial(plain_mlp, use_bias=bias)
        return attention_block(
            config, options, rngs, qkv_bias=bias, out_bias=bias, make_mlp=make_mlp
        )


def names(config: Config) -> list[ParameterEntry]:
    """Every parameter and the tensors of a Hugging Face folder that it is made of."""
    bias = config.use_bias
    return decoder_names(config, qkv_bias=bias, out_bias=bias, mlp_bias=bias, mlp_parts=PARTS)
