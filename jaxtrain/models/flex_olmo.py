"""FlexOlmo (Shi et al. 2025, arXiv:2507.07024): OLMo 2 with OLMoE's experts in every layer."""

import dataclasses
from typing import ClassVar

from flax import nnx

from jaxtrain.huggingface.ops import ParameterEntry
from jaxtrain.layers.norm import PreciseRMSNorm, RMSNorm
from jaxtrain.models import olmoe
from jaxtrain.models.decoder import Decoder, DecoderOptions
from jaxtrain.models.naming import POST_NORMS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(olmoe.OlmoExpertsConfig):
    architecture: ClassVar[str] = "FlexOlmoForCausalLM"
    model_type: ClassVar[str] = "flex_olmo"
    norm: ClassVar[type[RMSNorm]] = PreciseRMSNorm


class Model(Decoder):
    def make_block(self, kind: str, config: Config, options: DecoderOptions, rngs: nnx.Rngs):
        return olmoe.make_expert_block(config, options, rngs, norms=POST_NORMS)


def names(config: Config) -> list[ParameterEntry]:
    """Every parameter and the tensors of a Hugging Face folder that it is made of."""
    return olmoe.names(config, POST_NORMS)
