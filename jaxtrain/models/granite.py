"""Granite 3 dense (IBM 2024): Llama with four multipliers, which the later Granites have, too."""

import dataclasses
from abc import abstractmethod
from typing import ClassVar

from jaxtrain.errors import UserError
from jaxtrain.models.blocks import (
    AttentionSpec,
    BlockSpec,
    DenseSpec,
    MLPSpec,
    SpecDecoder,
    spec_names,
)
from jaxtrain.models.decoder_config import DecoderConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class GraniteConfig(DecoderConfig):
    """A DecoderConfig with what all Granites have."""

    sinks: ClassVar[bool] = False
    """Attention has a sink for each head."""

    attention_bias: bool = False
    """On all four projections."""
    attention_multiplier: float
    """Scale of scores."""
    embedding_multiplier: float
    residual_multiplier: float
    logits_scaling: float
    """Logits are divided by it."""

    def check(self) -> None:
        if self.logits_scaling <= 0:
            raise UserError(f"config.json: logits_scaling={self.logits_scaling} must be above 0")
        super().check()

    @property
    def embedding_scale(self) -> float:
        return self.embedding_multiplier

    @property
    def logit_scale(self) -> float:
        return 1 / self.logits_scaling

    @property
    @abstractmethod
    def branch_spec(self) -> MLPSpec:
        """Declaration of the MLP, experts or both."""

    def block_spec(self, kind: str) -> BlockSpec:
        bias, scale = self.attention_bias, self.attention_multiplier
        attention = AttentionSpec(qkv_bias=bias, out_bias=bias, scale=scale, sinks=self.sinks)
        return BlockSpec(attention, self.branch_spec, residual_scale=self.residual_multiplier)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(GraniteConfig):
    architecture: ClassVar[str] = "GraniteForCausalLM"
    model_type: ClassVar[str] = "granite"

    mlp_bias: bool = False

    @property
    def branch_spec(self) -> MLPSpec:
        return DenseSpec(bias=self.mlp_bias)


Model, names = SpecDecoder, spec_names
