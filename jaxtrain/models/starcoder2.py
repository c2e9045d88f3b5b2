"""StarCoder2 (Lozhkov et al. 2024, arXiv:2402.19173): LayerNorm, an MLP without a gate, biases
everywhere, and perhaps a sliding window."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from jaxtrain.layers.mixer import LayerSpec
from jaxtrain.layers.norm import LayerNorm, RMSNorm
from jaxtrain.models.blocks import AttentionSpec, BlockSpec, DenseSpec, SpecDecoder, spec_names
from jaxtrain.models.decoder_config import DecoderConfig

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

    def block_spec(self, kind: str) -> BlockSpec:
        bias = self.use_bias
        return BlockSpec(
            AttentionSpec(qkv_bias=bias, out_bias=bias), DenseSpec(bias=bias, parts=PARTS)
        )


Model, names = SpecDecoder, spec_names
