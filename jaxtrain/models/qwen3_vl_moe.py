"""Qwen3-VL-MoE (Qwen Team 2025, arXiv:2511.21631): Qwen3-VL with experts in place of the MLP."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from jaxtrain.errors import UserError
from jaxtrain.models import qwen3_moe, qwen3_vl
from jaxtrain.models.blocks import ExpertsSpec, SpecDecoder
from jaxtrain.models.experts import FusedExpertsSpec, SparseStepConfig
from jaxtrain.models.qwen_vision import QwenImageConfig, qwen_names


class TowerConfig(qwen3_vl.TowerConfig):
    model_type: ClassVar[str] = "qwen3_vl_moe_vision"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(QwenImageConfig, SparseStepConfig):
    architecture: ClassVar[str] = "Qwen3VLMoeForConditionalGeneration"
    model_type: ClassVar[str] = "qwen3_vl_moe"
    text_type: ClassVar[str] = "qwen3_vl_moe_text"
    tower_type: ClassVar[type[TowerConfig]] = TowerConfig
    prefixes: ClassVar[tuple[str, ...]] = ("model.language_model.",)
    rope_keys: ClassVar[tuple[str, ...]] = ("mrope_section", "mrope_interleaved")

    attention_bias: bool = False
    """On all four projections."""
    norm_topk_prob: bool = True
    transposed_experts: bool = True
    """True for folders whose experts are [E, in, out], as published; transformers 5 writes [E, out,
    in], and reads both."""

    def fit(self, tensors: Mapping[str, Any]) -> Self:
        shape = next(
            (x.shape for name, x in tensors.items() if name.endswith("experts.gate_up_proj")), None
        )
        plain = (self.num_local_experts, 2 * self.moe_intermediate_size, self.hidden_size)
        return dataclasses.replace(super().fit(tensors), transposed_experts=shape != plain)

    @classmethod
    def read_text(cls, text: dict[str, Any]) -> dict[str, Any]:
        return super().read_text(cls.join_aliases(text))

    def to_hf(self) -> dict[str, Any]:
        """Return the content of a config.json, with the number of experts under both its names."""
        raw = super().to_hf()
        raw["text_config"]["num_experts"] = self.num_local_experts
        return raw

    def check(self) -> None:
        if not self.norm_topk_prob:
            raise UserError("config.json: norm_topk_prob=false is not supported; only true is")
        super().check()

    @property
    def experts_spec(self) -> ExpertsSpec:
        hidden, swapped = self.moe_intermediate_size, self.transposed_experts
        return FusedExpertsSpec(hidden=hidden, swapped=swapped)

    block_spec = qwen3_moe.Config.block_spec


Model, names = SpecDecoder, qwen_names
