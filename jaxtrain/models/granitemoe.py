"""Granite 3 with experts (IBM 2024): Granite whose MLP is a mixture of experts, and in the later
"shared" form an MLP beside them that all tokens go through."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import ClassVar

from flax import nnx

from jaxtrain.huggingface.ops import ParameterEntry
from jaxtrain.models.blocks import experts_mlp
from jaxtrain.models.decoder import Decoder, DecoderOptions
from jaxtrain.models.experts import ExpertsConfig
from jaxtrain.models.granite import GraniteConfig, granite_block
from jaxtrain.models.naming import attention_names, fused_expert_names, outer_names


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(ExpertsConfig, GraniteConfig):
    """F of an expert is intermediate_size."""

    architecture: ClassVar[str] = "GraniteMoeForCausalLM"
    model_type: ClassVar[str] = "granitemoe"

    @property
    def shared_width(self) -> int | None:
        """F of the MLP that all tokens go through; None: there is none."""
        return None


class Model(Decoder):
    def make_block(self, kind: str, config: Config, options: DecoderOptions, rngs: nnx.Rngs):
        return granite_block(
            config,
            options,
            rngs,
            functools.partial(
                experts_mlp,
                num_hidden=config.intermediate_size,
                num_shared=config.shared_width,
            ),
        )


def names(config: Config) -> list[ParameterEntry]:
    """Every parameter and the tensors of a Hugging Face folder that it is made of."""
    layers, bias = range(config.num_hidden_layers), config.attention_bias
    return [
        *outer_names(config),
        *attention_names("block", layers, qkv_bias=bias, out_bias=bias),
        *granite_expert_names("block", layers, config.intermediate_size),
    ]


def granite_expert_names(kind: str, layers: Sequence[int], hidden: int) -> list[ParameterEntry]:
    """The router and experts of `hidden` dims, as all Granites call them."""
    return fused_expert_names(
        kind,
        layers,
        hidden,
        module="block_sparse_moe.",
        router="router.layer",
        tensors=("input_linear.weight", "output_linear.weight"),
    )
