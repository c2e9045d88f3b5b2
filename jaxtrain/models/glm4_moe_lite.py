"""GLM-4.7-Flash (Zhipu AI 2026): a DeepSeek-V3 with heads of 256 dims throughout."""

import dataclasses
from typing import ClassVar

from flax import nnx

from jaxtrain.errors import UserError
from jaxtrain.huggingface.ops import ParameterEntry
from jaxtrain.models.decoder import Decoder, DecoderOptions
from jaxtrain.models.latent import (
    ListedLatentConfig,
    PairedLatentConfig,
    latent_names,
    make_latent_block,
)
from jaxtrain.models.mtp_form import MTPForm, layer_form


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(ListedLatentConfig, PairedLatentConfig):
    architecture: ClassVar[str] = "Glm4MoeLiteForCausalLM"
    model_type: ClassVar[str] = "glm4_moe_lite"

    @property
    def mtp_form(self) -> MTPForm:
        return layer_form(self.num_hidden_layers)

    def check(self) -> None:
        super().check()
        dense, types = self.first_k_dense_replace, self.mlp_layer_types
        if dense is not None and any((n < dense) != (t == "dense") for n, t in enumerate(types)):
            raise UserError(
                f"config.json: first_k_dense_replace={dense} says something else than"
                " mlp_layer_types, which by default has one dense layer; make them agree"
            )


class Model(Decoder):
    def make_block(self, kind: str, config: Config, options: DecoderOptions, rngs: nnx.Rngs):
        return make_latent_block(kind, config, options, rngs)


def names(config: Config) -> list[ParameterEntry]:
    """Every parameter and the tensors of a Hugging Face folder that it is made of."""
    return latent_names(config)
