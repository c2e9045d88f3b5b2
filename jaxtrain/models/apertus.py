"""Apertus (Swiss AI 2025, arXiv:2509.14233): an MLP without a gate behind an activation that is
trained, and norms on queries and keys."""

import dataclasses
from collections.abc import Collection
from typing import ClassVar

from flax import nnx

from jaxtrain.huggingface.ops import ParameterEntry
from jaxtrain.layers.linear import LayerInit
from jaxtrain.layers.mlp import ACTIVATIONS, MLP
from jaxtrain.layers.xielu import XIELUMLP
from jaxtrain.models.blocks import attention_block, plain_mlp
from jaxtrain.models.decoder import Decoder, DecoderOptions
from jaxtrain.models.decoder_config import DecoderConfig
from jaxtrain.models.naming import PLAIN_PARTS, decoder_names, layer_entry

NORMS = {"attention_norm": "attention_layernorm", "mlp_norm": "feedforward_layernorm"}
TRAINED = "xielu"
NUMBERS = ("alpha_p", "alpha_n", "beta", "eps")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    architecture: ClassVar[str] = "ApertusForCausalLM"
    model_type: ClassVar[str] = "apertus"
    activations: ClassVar[Collection[str]] = (TRAINED, *ACTIVATIONS)

    attention_bias: bool = False
    """On all four projections."""


def make_mlp(config: Config, init: LayerInit) -> MLP:
    """Build the MLP of a layer."""
    if config.hidden_act != TRAINED:
        return plain_mlp(config, init)
    return XIELUMLP(config.hidden_size, config.intermediate_size, init=init)


class Model(Decoder):
    def make_block(self, kind: str, config: Config, options: DecoderOptions, rngs: nnx.Rngs):
        bias = config.attention_bias
        return attention_block(
            config,
            options,
            rngs,
            qkv_bias=bias,
            out_bias=bias,
            qk_norm="head",
            norms=NORMS,
            make_mlp=make_mlp,
        )


def names(config: Config) -> list[ParameterEntry]:
    """Every parameter and the tensors of a Hugging Face folder that it is made of."""
    layers, bias = range(config.num_hidden_layers), config.attention_bias
    trained = NUMBERS if config.hidden_act == TRAINED else ()
    return [
        *decoder_names(
            config,
            qkv_bias=bias,
            out_bias=bias,
            qk_norm=True,
            norms=NORMS,
            mlp_parts=PLAIN_PARTS,
        ),
        *(
            layer_entry("block", layers, f"mlp.act.{number}", f"mlp.act_fn.{number}")
            for number in trained
        ),
    ]
