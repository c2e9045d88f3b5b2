"""GPT-J (Wang and Komatsuzaki 2021): attention and MLP side by side behind one LayerNorm, an MLP
without a gate, adjacent pairs of a part of each head rotated, a bias on the head."""

import dataclasses
from typing import ClassVar

import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.layers.rope import frequencies
from jaxtrain.models.blocks import AttentionSpec, BlockSpec, DenseSpec, SpecDecoder
from jaxtrain.models.joint_heads import GPTConfig, gpt_names

ROPE = {"rope_theta": 1e4}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(GPTConfig):
    architecture: ClassVar[str] = "GPTJForCausalLM"
    model_type: ClassVar[str] = "gptj"
    final_norm_name: ClassVar[str] = "ln_f"

    rotary_dim: int
    """Dims of a head that are rotated."""
    attention: ClassVar[type[AttentionSpec]] = AttentionSpec

    @property
    def head_bias(self) -> bool:
        return True

    def encodings(self) -> dict[str, tuple[np.ndarray, float]]:
        return {"default": frequencies(self.rotary_dim, ROPE)}

    def check_heads(self) -> None:
        super().check_heads()
        if self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_size:
            raise UserError(
                f"config.json: rotary_dim={self.rotary_dim} must be even and at most the dims of a"
                f" head, {self.head_size}"
            )

    def block_spec(self, kind: str) -> BlockSpec:
        attention = self.attention(adjacent=True, out_name="out_proj")
        mlp = DenseSpec(bias=True, parts={"up": "fc_in", "down": "fc_out"})
        return BlockSpec(attention, mlp, norms={"attention_norm": "ln_1"}, parallel=True)


Model, names = SpecDecoder, gpt_names
