"""HyperCLOVA X SEED (NAVER 2025): Granite 3 with further norms behind both layers, whose logits are
multiplied by `logits_scaling`."""

import dataclasses
import functools
from typing import ClassVar

from flax import nnx

from jaxtrain.huggingface.ops import ParameterEntry
from jaxtrain.models import granite
from jaxtrain.models.blocks import dense_mlp
from jaxtrain.models.decoder import Decoder, DecoderOptions
from jaxtrain.models.naming import PRE_NORMS, decoder_names

NORMS = {**PRE_NORMS, "attention_out_norm": "post_norm1", "mlp_out_norm": "post_norm2"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(granite.Config):
    architecture: ClassVar[str] = "HyperCLOVAXForCausalLM"
    model_type: ClassVar[str] = "hyperclovax"

    use_post_norm: bool = True

    @property
    def logit_scale(self) -> float:
        return self.logits_scaling

    @property
    def block_norms(self) -> dict[str, str]:
        """The norms of a block and what they are called there."""
        return NORMS if self.use_post_norm else PRE_NORMS


class Model(Decoder):
    def make_block(self, kind: str, config: Config, options: DecoderOptions, rngs: nnx.Rngs):
        make_mlp = functools.partial(dense_mlp, use_bias=config.mlp_bias)
        return granite.granite_block(config, options, rngs, make_mlp, norms=config.block_norms)


def names(config: Config) -> list[ParameterEntry]:
    """Every parameter and the tensors of a Hugging Face folder that it is made of."""
    bias, norms = config.attention_bias, config.block_norms
    return decoder_names(
        config, qkv_bias=bias, out_bias=bias, mlp_bias=config.mlp_bias, norms=norms
    )
