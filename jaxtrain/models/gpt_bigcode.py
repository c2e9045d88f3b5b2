"""GPTBigCode (StarCoder: Li et al. 2023, arXiv:2305.06161): GPT-2 with one key head, or with
queries, keys and values side by side, head by head."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from jaxtrain.huggingface.ops import ParameterEntry
from jaxtrain.models.blocks import BlockSpec, DenseSpec, SpecDecoder
from jaxtrain.models.gpt2 import NORMS, PARTS, PositionedConfig
from jaxtrain.models.joint_heads import JointHeadsSpec, gpt_names
from jaxtrain.models.naming import rename_tensors


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(PositionedConfig):
    architecture: ClassVar[str] = "GPTBigCodeForCausalLM"
    model_type: ClassVar[str] = "gpt_bigcode"
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "add_cross_attention": (False,),
        "attention_softmax_in_fp32": (),
        "scale_attention_softmax_in_fp32": (),
        "scale_attn_weights": (True,),
    }

    multi_query: bool = True
    """One key head for all queries."""

    def block_spec(self, kind: str) -> BlockSpec:
        count = 1 if self.multi_query else self.num_attention_heads
        attention = JointHeadsSpec(kv_heads=count, qkv_bias=True, out_bias=True)
        return BlockSpec(attention, DenseSpec(bias=True, parts=PARTS), norms=NORMS)


Model = SpecDecoder


def names(config: Config) -> list[ParameterEntry]:
    """Every parameter and the tensors of a Hugging Face folder that it is made of."""
    return rename_tensors(gpt_names(config), rename)


def rename(name: str) -> str:
    """Return the family's name of a tensor that other families call `name`."""
    return name.replace(".query_key_value.", ".c_attn.").replace(".attn.dense.", ".attn.c_proj.")
