"""GLM-4.7-Flash (Zhipu AI 2026): a DeepSeek-V3 with heads of 256 dims throughout."""

import dataclasses
from typing import ClassVar

from jaxtrain.errors import UserError
from jaxtrain.models.blocks import SpecDecoder, spec_names
from jaxtrain.models.latent import ListedLatentConfig, PairedLatentConfig
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


Model, names = SpecDecoder, spec_names
