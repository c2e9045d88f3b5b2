"""dots.llm1 (rednote 2025, arXiv:2506.05767): DeepSeek-V3's experts behind Qwen3's
attention."""

import dataclasses
from typing import ClassVar

from flax import nnx

from jaxtrain.huggingface.ops import ParameterEntry
from jaxtrain.layers.mixer import LayerSpec
from jaxtrain.models.blocks import attention_block, dense_mlp, grouped_experts_mlp
from jaxtrain.models.decoder import Decoder, DecoderOptions
from jaxtrain.models.experts import GroupedExpertsConfig
from jaxtrain.models.naming import attention_names, grouped_expert_names, mlp_names, outer_names
from jaxtrain.models.windows import windowed_layers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(GroupedExpertsConfig):
    architecture: ClassVar[str] = "Dots1ForCausalLM"
    model_type: ClassVar[str] = "dots1"

    attention_bias: bool = False
    """On all four projections."""
    sliding_window: int | None = None
    max_window_layers: int | None = None
    layer_types: tuple[str, ...] | None = None
    """Which layers slide; transformers derives it from max_window_layers where it is absent."""

    def layers(self) -> tuple[LayerSpec, ...]:
        windows = windowed_layers(self.num_hidden_layers, self.layer_types, self.sliding_window)
        kinds = (spec.kind for spec in super().layers())
        return tuple(
            dataclasses.replace(spec, kind=kind) for spec, kind in zip(windows, kinds, strict=True)
        )


class Model(Decoder):
    def make_block(self, kind: str, config: Config, options: DecoderOptions, rngs: nnx.Rngs):
        bias, make_mlp = (
            config.attention_bias,
            dense_mlp if kind == "dense" else grouped_experts_mlp,
        )
        return attention_block(
            config, options, rngs, qkv_bias=bias, out_bias=bias, qk_norm="head", make_mlp=make_mlp
        )


def names(config: Config) -> list[ParameterEntry]:
    """Every parameter and the tensors of a Hugging Face folder that it is made of."""
    entries, bias = outer_names(config), config.attention_bias
    for kind, layers in config.layers_by_kind().items():
        entries += attention_names(kind, layers, qkv_bias=bias, out_bias=bias, qk_norm=True)
        if kind == "dense":
            entries += mlp_names(kind, layers)
        else:
            entries += grouped_expert_names(kind, layers, config)
    return entries
