"""HyperCLOVA X SEED (NAVER 2025): Granite 3 with further norms behind both layers, whose logits are
multiplied by `logits_scaling`."""

import dataclasses
from typing import ClassVar

from jaxtrain.models import granite
from jaxtrain.models.blocks import BlockSpec, SpecDecoder, spec_names
from jaxtrain.models.naming import PRE_NORMS

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

    def block_spec(self, kind: str) -> BlockSpec:
        return dataclasses.replace(super().block_spec(kind), norms=self.block_norms)


Model, names = SpecDecoder, spec_names
