"""nanochat (Karpathy 2025): no norm has weights, embeddings and, once they are rotated, queries and
keys are normed; an MLP without a gate behind a squared ReLU, and a softcap on logits."""

import dataclasses
from typing import ClassVar

import numpy as np
from flax import nnx
from typing_extensions import override

from jaxtrain.huggingface.ops import ParameterEntry
from jaxtrain.layers.norm import RMSNorm, UnitRMSNorm
from jaxtrain.models.blocks import attention_block, plain_mlp
from jaxtrain.models.decoder import Decoder, DecoderOptions
from jaxtrain.models.decoder_config import DecoderConfig
from jaxtrain.models.naming import decoder_names

PARTS = {"up": "fc1", "down": "fc2"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    architecture: ClassVar[str] = "NanoChatForCausalLM"
    model_type: ClassVar[str] = "nanochat"
    norm: ClassVar[type[RMSNorm]] = UnitRMSNorm

    attention_bias: bool = False
    """On all four projections."""
    final_logit_softcapping: float | None = None

    @override
    def encodings(self) -> dict[str, tuple[np.ndarray, float]]:
        # The family turns pairs of dims the other way round.
        return {name: (-turns, factor) for name, (turns, factor) in super().encodings().items()}

    @property
    def norms_embeddings(self) -> bool:
        return True

    @property
    def logit_softcap(self) -> float | None:
        return self.final_logit_softcapping


class Model(Decoder):
    def make_block(self, kind: str, config: Config, options: DecoderOptions, rngs: nnx.Rngs):
        bias = config.attention_bias
        return attention_block(
            config,
            options,
            rngs,
            qkv_bias=bias,
            out_bias=bias,
            qk_norm="rotated_head",
            make_mlp=plain_mlp,
        )


def names(config: Config) -> list[ParameterEntry]:
    """Every parameter and the tensors of a Hugging Face folder that it is made of."""
    bias = config.attention_bias
    return decoder_names(config, qkv_bias=bias, out_bias=bias, mlp_parts=PARTS)
