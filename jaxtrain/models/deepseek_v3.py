"""DeepSeek-V3 (arXiv:2412.19437): latent attention, and experts chosen by sigmoids within groups;
Kimi-K2 (Moonshot 2025) is one, too."""

import dataclasses
from typing import ClassVar

from flax import nnx

from jaxtrain.huggingface.ops import ParameterEntry
from jaxtrain.models.decoder import Decoder, DecoderOptions
from jaxtrain.models.latent import (
    LatentConfig,
    PairedLatentConfig,
    latent_names,
    make_latent_block,
)
from jaxtrain.models.mtp_form import MTPForm, layer_form


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(PairedLatentConfig, LatentConfig):
    architecture: ClassVar[str] = "DeepseekV3ForCausalLM"
    model_type: ClassVar[str] = "deepseek_v3"

    @property
    def mtp_form(self) -> MTPForm:
        return layer_form(self.num_hidden_layers)


class Model(Decoder):
    def make_block(self, kind: str, config: Config, options: DecoderOptions, rngs: nnx.Rngs):
        return make_latent_block(kind, config, options, rngs)


def names(config: Config) -> list[ParameterEntry]:
    """Every parameter and the tensors of a Hugging Face folder that it is made of."""
    return latent_names(config)
