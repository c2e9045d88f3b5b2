"""Granite with experts and sliding windows (IBM 2026): Granite 3's experts, perhaps with an MLP
beside them, behind windows, sinks and a rotation base for each layer."""

import dataclasses
import functools
from typing import ClassVar

from flax import nnx

from jaxtrain.huggingface.ops import ParameterEntry
from jaxtrain.models import granitemoeshared
from jaxtrain.models.blocks import experts_mlp
from jaxtrain.models.decoder import Decoder, DecoderOptions
from jaxtrain.models.granite import granite_block
from jaxtrain.models.granite_swa import WindowedGraniteConfig
from jaxtrain.models.naming import attention_names, fused_expert_names, layer_entry, outer_names


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(granitemoeshared.Config, WindowedGraniteConfig):
    architecture: ClassVar[str] = "GraniteMoeSWAForCausalLM"
    model_type: ClassVar[str] = "granitemoe_swa"

    shared_intermediate_size: int = 0


class Model(Decoder):
    def make_block(self, kind: str, config: Config, options: DecoderOptions, rngs: nnx.Rngs):
        make_mlp = functools.partial(
            experts_mlp, num_hidden=config.intermediate_size, num_shared=config.shared_width
        )
        return granite_block(config, options, rngs, make_mlp, sinks=True)


def names(config: Config) -> list[ParameterEntry]:
    """Every parameter and the tensors of a Hugging Face folder that it is made of."""
    layers, bias = range(config.num_hidden_layers), config.attention_bias
    shared = config.shared_intermediate_size
    return [
        *outer_names(config),
        *attention_names("block", layers, qkv_bias=bias, out_bias=bias),
        layer_entry("block", layers, "attention.sinks", "self_attn.sinks"),
        *fused_expert_names(
            "block",
            layers,
            config.intermediate_size,
            module="block_sparse_moe.",
            router="router",
        ),
        *(granitemoeshared.shared_names("block", layers, shared, "mlp.shared") if shared else []),
    ]
