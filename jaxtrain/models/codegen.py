"""CodeGen (Nijkamp et al. 2022, arXiv:2203.13474): GPT-J with queries, values and keys in one
matrix, in four parts."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from jaxtrain.errors import UserError
from jaxtrain.huggingface.ops import ParameterEntry
from jaxtrain.models import gptj
from jaxtrain.models.blocks import AttentionSpec
from jaxtrain.models.naming import linear_entries, row_names

PARTS = 4
"""Devices that the models were trained on, each with its own heads."""


class PartedHeadsSpec(AttentionSpec):
    """Attention whose queries, values and keys are one tensor, part by part."""

    def projection_names(
        self, config: Any, kind: str, layers: Sequence[int]
    ) -> list[ParameterEntry]:
        size = config.hidden_size // PARTS
        starts = (range(order, 3 * PARTS, 3) for order in range(3))
        runs = {
            f"attention.{projection}": tuple((start * size, size) for start in parts)
            for projection, parts in zip("qvk", starts, strict=True)
        }
        return [
            *row_names(kind, layers, "self_attn.qkv_proj", runs),
            *linear_entries(kind, layers, "attention.out", f"self_attn.{self.out_name}"),
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(gptj.Config):
    architecture: ClassVar[str] = "CodeGenForCausalLM"
    model_type: ClassVar[str] = "codegen"
    attention: ClassVar[type[AttentionSpec]] = PartedHeadsSpec
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {"n_ctx": ()}

    def check_heads(self) -> None:
        super().check_heads()
        if self.num_attention_heads % PARTS:
            raise UserError(
                f"config.json: n_head={self.num_attention_heads} must be a multiple of {PARTS}, the"
                " parts of the joint matrix"
            )


Model, names = gptj.Model, gptj.names
