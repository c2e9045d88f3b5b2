"""GPT-J (Wang and Komatsuzaki 2021): attention and MLP side by side behind one LayerNorm, an MLP
without a gate, adjacent pairs of a part of each head rotated, a bias on the head."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.huggingface.config import hf_defaults
from jaxtrain.huggingface.ops import ParameterEntry
from jaxtrain.layers.rope import frequencies
from jaxtrain.models.blocks import AttentionSpec, BlockSpec, DenseSpec, SpecDecoder, spec_names
from jaxtrain.models.joint_heads import EqualHeadsConfig
from jaxtrain.models.naming import rename_tensors

ATTRIBUTES = {
    "hidden_act": "activation_function",
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "rms_norm_eps": "layer_norm_epsilon",
}
"""The attributes that GPT-2 and its successors call otherwise."""
ROPE = {"rope_theta": 1e4}


class GPTConfig(EqualHeadsConfig):
    """An EqualHeadsConfig with GPT-2's attributes."""

    renamed: ClassVar[Mapping[str, str]] = ATTRIBUTES

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        if raw.get("n_inner") is None:
            width = raw.get("n_embd", raw.get("hidden_size"))
            width = hf_defaults(cls.model_type)["n_embd"] if width is None else width
            raw = {**raw, "n_inner": 4 * width if isinstance(width, int) else None}
        return super().from_hf(raw)

    def to_hf(self) -> dict[str, Any]:
        raw = super().to_hf()
        return raw if raw["n_inner"] != 4 * self.hidden_size else {**raw, "n_inner": None}


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


Model = SpecDecoder


def names(config: Config) -> list[ParameterEntry]:
    """Every parameter and the tensors of a Hugging Face folder that it is made of."""
    return rename_tensors(spec_names(config), rename)


def rename(name: str) -> str:
    """Return the family's name of a tensor that other families call `name`."""
    name = name.replace("model.layers.", "transformer.h.").replace("model.", "transformer.", 1)
    return name.replace(".self_attn.", ".attn.").replace(".embed_tokens.", ".wte.")
