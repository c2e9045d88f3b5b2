"""DeepSeek-V3 (arXiv:2412.19437): latent attention, and experts chosen by sigmoids within groups;
Kimi-K2 (Moonshot 2025) is one, too."""

import dataclasses
from typing import ClassVar

from flax import nnx

from jaxtrain.hf.ops import Entry
from jaxtrain.models.decoder import Decoder, Options
from jaxtrain.models.latent import PairedLatentConfig, latent_names, make_latent_block


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(PairedLatentConfig):
    architecture: ClassVar[str] = "DeepseekV3ForCausalLM"
    model_type: ClassVar[str] = "deepseek_v3"


class Model(Decoder):
    def make_block(self, kind: str, config: Config, options: Options, rngs: nnx.Rngs):
        return make_latent_block(kind, config, options, rngs)


def names(config: Config) -> list[Entry]:
    """Every parameter and the tensors of a Hugging Face folder that it is made of."""
    return latent_names(config)
