"""nanochat (Karpathy 2025): no norm has weights, embeddings and, once they are rotated, queries and
keys are normed; an MLP without a gate behind a squared ReLU, and a softcap on logits."""

import dataclasses
from typing import ClassVar

import numpy as np
from typing_extensions import override

from jaxtrain.layers.norm import RMSNorm, UnitRMSNorm
from jaxtrain.models.blocks import AttentionSpec, BlockSpec, DenseSpec, SpecDecoder, spec_names
from jaxtrain.models.decoder_config import DecoderConfig

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

    def block_spec(self, kind: str) -> BlockSpec:
        bias = self.attention_bias
        return BlockSpec(
            AttentionSpec(qkv_bias=bias, out_bias=bias, qk_norm="rotated_head"),
            DenseSpec(parts=PARTS),
        )


Model, names = SpecDecoder, spec_names
