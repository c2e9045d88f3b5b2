"""ERNIE 4.5 dense (Baidu 2025): Llama that rotates pairs of adjacent dims."""

import dataclasses
from typing import ClassVar

from jaxtrain.models.blocks import AttentionSpec, BlockSpec, DenseSpec, SpecDecoder, spec_names
from jaxtrain.models.decoder_config import DecoderConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    architecture: ClassVar[str] = "Ernie4_5ForCausalLM"
    model_type: ClassVar[str] = "ernie4_5"

    use_bias: bool = False
    """On all matrices of a layer."""

    def block_spec(self, kind: str) -> BlockSpec:
        bias = self.use_bias
        return BlockSpec(
            AttentionSpec(qkv_bias=bias, out_bias=bias, adjacent=True), DenseSpec(bias=bias)
        )


Model, names = SpecDecoder, spec_names
