"""Youtu-LLM (Tencent 2025, arXiv:2512.24618): DeepSeek-V3's latent attention and dense MLPs."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from flax import nnx

from jaxtrain.huggingface.ops import ParameterEntry
from jaxtrain.models.decoder import Decoder, DecoderOptions
from jaxtrain.models.latent import PairedLatentConfig, latent_names, make_latent_block


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(PairedLatentConfig):
    architecture: ClassVar[str] = "YoutuForCausalLM"
    model_type: ClassVar[str] = "youtu"
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "embedding_initializer_range": (),
        "mlp_bias": (False,),
    }


class Model(Decoder):
    def make_block(self, kind: str, config: Config, options: DecoderOptions, rngs: nnx.Rngs):
        return make_latent_block(kind, config, options, rngs)


def names(config: Config) -> list[ParameterEntry]:
    """Every parameter and the tensors of a Hugging Face folder that it is made of."""
    return latent_names(config)
