"""Apertus (Swiss AI 2025, arXiv:2509.14233): an MLP without a gate behind an activation that is
trained, and norms on queries and keys."""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any, ClassVar

from jaxtrain.huggingface.ops import ParameterEntry
from jaxtrain.layers.linear import LayerInit
from jaxtrain.layers.mlp import ACTIVATIONS, MLP
from jaxtrain.layers.xielu import XIELUMLP
from jaxtrain.models.blocks import AttentionSpec, BlockSpec, DenseSpec, SpecDecoder, spec_names
from jaxtrain.models.decoder_config import DecoderConfig
from jaxtrain.models.naming import PLAIN_PARTS, layer_entry

NORMS = {"attention_norm": "attention_layernorm", "mlp_norm": "feedforward_layernorm"}
TRAINED = "xielu"
NUMBERS = ("alpha_p", "alpha_n", "beta", "eps")


class TrainedSpec(DenseSpec):
    """An MLP without a gate behind an activation that is trained."""

    def build(self, config: DecoderConfig, init: LayerInit) -> MLP:
        return XIELUMLP(config.hidden_size, config.intermediate_size, init=init)

    def names(self, config: Any, kind: str, layers: Sequence[int]) -> list[ParameterEntry]:
        numbers = [(f"mlp.act.{number}", f"mlp.act_fn.{number}") for number in NUMBERS]
        entries = [layer_entry(kind, layers, *names) for names in numbers]
        return super().names(config, kind, layers) + entries


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    architecture: ClassVar[str] = "ApertusForCausalLM"
    model_type: ClassVar[str] = "apertus"
    activations: ClassVar[Collection[str]] = (TRAINED, *ACTIVATIONS)

    attention_bias: bool = False
    """On all four projections."""

    def block_spec(self, kind: str) -> BlockSpec:
        bias = self.attention_bias
        mlp = (TrainedSpec if self.hidden_act == TRAINED else DenseSpec)(parts=PLAIN_PARTS)
        return BlockSpec(
            AttentionSpec(qkv_bias=bias, out_bias=bias, qk_norm="head"), mlp, norms=NORMS
        )


Model, names = SpecDecoder, spec_names
