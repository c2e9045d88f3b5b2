"""GLM-4.7-Flash (Zhipu AI 2026): a DeepSeek-V3 with heads of 256 dims throughout."""

import dataclasses
from typing import ClassVar

from flax import nnx

from jaxtrain.hf.ops import Entry
from jaxtrain.models.decoder import Decoder, Options
from jaxtrain.models.latent import (
    ListedLatentConfig,
    PairedLatentConfig,
    latent_names,
    make_latent_block,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(ListedLatentConfig, PairedLatentConfig):
    architecture: ClassVar[str] = "Glm4MoeLiteForCausalLM"
    model_type: ClassVar[str] = "glm4_moe_lite"


class Model(Decoder):
    def make_block(self, kind: str, config: Config, options: Options, rngs: nnx.Rngs):
        return make_latent_block(kind, config, options, rngs)


def names(config: Config) -> list[Entry]:
    """Every parameter and the tensors of a Hugging Face folder that it is made of."""
    return latent_names(config)
