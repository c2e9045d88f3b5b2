"""Mixtral (Jiang et al. 2024, arXiv:2401.04088): Mistral with experts in every layer; the gates of
a token are a softmax over its chosen experts."""

import dataclasses
import functools
from typing import ClassVar

from flax import nnx

from jaxtrain.huggingface.ops import ParameterEntry
from jaxtrain.layers.mixer import LayerSpec
from jaxtrain.models.blocks import attention_block, experts_mlp
from jaxtrain.models.decoder import Decoder, DecoderOptions
from jaxtrain.models.experts import ExpertsConfig
from jaxtrain.models.naming import attention_names, expert_names, outer_names


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(ExpertsConfig):
    architecture: ClassVar[str] = "MixtralForCausalLM"
    model_type: ClassVar[str] = "mixtral"

    sliding_window: int | None = None

    def layers(self) -> tuple[LayerSpec, ...]:
        return (LayerSpec(window=self.sliding_window),) * self.num_hidden_layers


class Model(Decoder):
    def make_block(self, kind: str, config: Config, options: DecoderOptions, rngs: nnx.Rngs):
        make_mlp = functools.partial(experts_mlp, num_hidden=config.intermediate_size)
        return attention_block(config, options, rngs, make_mlp=make_mlp)


def names(config: Config) -> list[ParameterEntry]:
    """Every parameter and the tensors of a Hugging Face folder that it is made of."""
    layers = range(config.num_hidden_layers)
    return [
        *outer_names(config),
        *attention_names("block", layers),
        *expert_names(
            "block",
            layers,
            config.num_local_experts,
            module="block_sparse_moe",
            parts={"gate": "w1", "up": "w3", "down": "w2"},
        ),
    ]
