"""GPT-NeoX (Black et al. 2022, arXiv:2204.06745), Pythia (arXiv:2304.01373): LayerNorm, an MLP
without a gate, a part of each head rotated, attention and MLP side by side behind a norm each."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from jaxtrain.huggingface.config_checks import check_rope
from jaxtrain.huggingface.ops import HEADS, TIED_COPY, ParameterEntry
from jaxtrain.models.blocks import BlockSpec, DenseSpec, SpecDecoder, spec_names
from jaxtrain.models.joint_heads import PARTS, EqualHeadsConfig, JointHeadsSpec
from jaxtrain.models.naming import rename_tensors

ROPE_KEYS = {"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"}
"""Attributes of older files, and what they are called in rope_parameters."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(EqualHeadsConfig):
    architecture: ClassVar[str] = "GPTNeoXForCausalLM"
    model_type: ClassVar[str] = "gpt_neox"
    final_norm_name: ClassVar[str] = "final_layer_norm"

    use_parallel_residual: bool = True
    """Attention and MLP read the same hidden states; else the MLP reads what attention wrote."""
    attention_bias: bool = True

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        raw = dict(raw)
        stated = raw.pop("rope_scaling", None) or raw.get("rope_parameters") or {}
        old = {name: raw.pop(key, None) for key, name in ROPE_KEYS.items()}
        old = {name: value for name, value in old.items() if value is not None}
        check_rope({"rope_parameters": stated}, False)
        return super().from_hf({**raw, "rope_parameters": {**old, **stated}})

    def to_hf(self) -> dict[str, Any]:
        """Return the content of a config.json, with the names of transformers 4, too."""
        raw, rope = super().to_hf(), dict(self.rope)
        del raw["rope_theta"], raw["partial_rotary_factor"]
        return raw | {key: rope[name] for key, name in ROPE_KEYS.items()}

    def block_spec(self, kind: str) -> BlockSpec:
        bias = self.attention_bias
        mlp = DenseSpec(bias=True, parts=PARTS)
        attention = JointHeadsSpec(qkv_bias=bias, out_bias=bias)
        return BlockSpec(attention, mlp, parallel=self.use_parallel_residual)


Model = SpecDecoder


def names(config: Config) -> list[ParameterEntry]:
    """Every parameter and the tensors of a Hugging Face folder that it is made of."""
    return rename_tensors(spec_names(config), rename)


def rename(name: str) -> str:
    """Return the family's name of a tensor that other families call `name`."""
    if name == TIED_COPY:
        return HEADS[1]
    name = name.replace("model.", "gpt_neox.", 1).replace(".self_attn.", ".attention.")
    return name.replace(".embed_tokens.", ".embed_in.")
