"""Qwen1.5-MoE and Qwen2-MoE (Yang et al. 2024, arXiv:2407.10671): Qwen2 with experts, and a shared
one of which a token takes its own share, in the place of the MLP."""

import dataclasses
import functools
from typing import ClassVar

from flax import nnx

from jaxtrain.huggingface.ops import ParameterEntry
from jaxtrain.layers.mixer import LayerSpec
from jaxtrain.models.blocks import attention_block, dense_mlp, experts_mlp
from jaxtrain.models.decoder import Decoder, DecoderOptions
from jaxtrain.models.experts import SparseStepConfig
from jaxtrain.models.naming import (
    attention_names,
    expert_names,
    layer_entry,
    mlp_names,
    outer_names,
)
from jaxtrain.models.windows import windowed_layers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(SparseStepConfig):
    architecture: ClassVar[str] = "Qwen2MoeForCausalLM"
    model_type: ClassVar[str] = "qwen2_moe"
    renamed: ClassVar[dict[str, str]] = {"num_local_experts": "num_experts"}

    shared_expert_intermediate_size: int
    """F of the shared expert."""
    qkv_bias: bool = True
    use_sliding_window: bool = False
    sliding_window: int | None = None
    max_window_layers: int | None = None
    layer_types: tuple[str, ...] | None = None
    """Which layers slide; transformers derives it from max_window_layers where it is absent."""

    def layers(self) -> tuple[LayerSpec, ...]:
        windows = windowed_layers(self.num_hidden_layers, self.layer_types, self.sliding_window)
        return tuple(
            dataclasses.replace(spec, kind=self.kind(layer)) for layer, spec in enumerate(windows)
        )


class Model(Decoder):
    def make_block(self, kind: str, config: Config, options: DecoderOptions, rngs: nnx.Rngs):
        experts = functools.partial(
            experts_mlp,
            num_hidden=config.moe_intermediate_size,
            num_shared=config.shared_expert_intermediate_size,
            gate_shared=True,
        )
        make_mlp = dense_mlp if kind == "dense" else experts
        return attention_block(config, options, rngs, qkv_bias=config.qkv_bias, make_mlp=make_mlp)


def names(config: Config) -> list[ParameterEntry]:
    """Every parameter and the tensors of a Hugging Face folder that it is made of."""
    entries = outer_names(config)
    for kind, layers in config.layers_by_kind().items():
        entries += attention_names(kind, layers, qkv_bias=config.qkv_bias)
        if kind == "dense":
            entries += mlp_names(kind, layers)
            continue
        entries += expert_names(kind, layers, config.num_local_experts, shared="shared_expert")
        gate = "mlp.shared_expert_gate.weight"
        entries.append(layer_entry(kind, layers, "mlp.shared_gate.kernel", gate, transpose=True))
    return entries
