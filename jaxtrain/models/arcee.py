"""AFM (Arcee 2025): Llama whose MLP has no gate, behind a squared ReLU."""

import dataclasses
from typing import ClassVar

from jaxtrain.models import llama
from jaxtrain.models.blocks import AttentionSpec, BlockSpec, DenseSpec, SpecDecoder, spec_names
from jaxtrain.models.naming import PLAIN_PARTS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(llama.Config):
    architecture: ClassVar[str] = "ArceeForCausalLM"
    model_type: ClassVar[str] = "arcee"

    def block_spec(self, kind: str) -> BlockSpec:
        bias = self.attention_bias
        return BlockSpec(
            AttentionSpec(qkv_bias=bias, out_bias=bias),
            DenseSpec(bias=self.mlp_bias, parts=PLAIN_PARTS),
        )


Model, names = SpecDecoder, spec_names
