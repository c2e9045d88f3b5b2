"""Qwen3-MoE (Yang et al. 2025, arXiv:2505.09388): Qwen3 with experts in the place of the MLP in
all layers, or with some dense ones between."""

import dataclasses
import functools
from typing import Any, ClassVar

from flax import nnx

from jaxtrain.huggingface.ops import ParameterEntry
from jaxtrain.layers.mixer import LayerSpec
from jaxtrain.models.blocks import attention_block, dense_mlp, experts_mlp
from jaxtrain.models.decoder import Decoder, DecoderOptions
from jaxtrain.models.experts import SparseStepConfig
from jaxtrain.models.naming import attention_names, expert_names, mlp_names, outer_names


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(SparseStepConfig):
    architecture: ClassVar[str] = "Qwen3MoeForCausalLM"
    model_type: ClassVar[str] = "qwen3_moe"

    attention_bias: bool = False
    """On all four projections."""
    use_sliding_window: bool = False
    sliding_window: int | None = None
    """Of all layers, where use_sliding_window is true."""
    max_window_layers: int | None = None
    """Without effect in this family; carried along."""

    def layers(self) -> tuple[LayerSpec, ...]:
        numbers = range(self.num_hidden_layers)
        return tuple(LayerSpec(self.kind(layer), window=self.sliding_window) for layer in numbers)

    def to_hf(self) -> dict[str, Any]:
        """With the number's name in transformers 4, too."""
        return super().to_hf() | {"num_experts": self.num_local_experts}


class Model(Decoder):
    def make_block(self, kind: str, config: Config, options: DecoderOptions, rngs: nnx.Rngs):
        bias = config.attention_bias
        experts = functools.partial(experts_mlp, num_hidden=config.moe_intermediate_size)
        return attention_block(
            config,
            options,
            rngs,
            qkv_bias=bias,
            out_bias=bias,
            qk_norm="head",
            make_mlp=dense_mlp if kind == "dense" else experts,
        )


def names(config: Config) -> list[ParameterEntry]:
    """Every parameter and the tensors of a Hugging Face folder that it is made of."""
    bias = config.attention_bias
    entries = outer_names(config)
    for kind, layers in config.layers_by_kind().items():
        entries += attention_names(kind, layers, qkv_bias=bias, out_bias=bias, qk_norm=True)
        if kind == "dense":
            entries += mlp_names(kind, layers)
        else:
            entries += expert_names(kind, layers, config.num_local_experts)
    return entries
