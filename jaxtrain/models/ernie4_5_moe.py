"""ERNIE 4.5 with experts (Baidu 2025): chosen by a softmax with a correction bias, beside shared
ones; pairs of adjacent dims are rotated."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from jaxtrain.errors import UserError
from jaxtrain.huggingface.ops import FirstRow, ParameterEntry, StackedOps
from jaxtrain.layers.mixer import LayerSpec
from jaxtrain.layers.router import RoutingOptions
from jaxtrain.models.blocks import AttentionSpec, BlockSpec, ExpertsSpec, SpecDecoder, spec_names
from jaxtrain.models.experts import ExpertsConfig

BIAS = "moe_statics.e_score_correction_bias"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(ExpertsConfig):
    architecture: ClassVar[str] = "Ernie4_5_MoeForCausalLM"
    model_type: ClassVar[str] = "ernie4_5_moe"
    renamed: ClassVar[Mapping[str, str]] = {
        "num_local_experts": "moe_num_experts",
        "num_experts_per_tok": "moe_k",
    }
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "moe_capacity": (),
        "moe_gate": (),
        "moe_use_aux_free": (True,),
        "num_nextn_predict_layers": (),
        "use_rmsnorm": (True,),
    }
    carries: ClassVar[tuple[str, ...]] = ("mtp", "model.mtp")
    goes_stale: ClassVar[tuple[str, ...]] = carries

    moe_intermediate_size: int
    """F of an expert; intermediate_size is that of a dense layer."""
    moe_num_shared_experts: int = 0
    """Experts that every token goes through: one MLP of so many times F."""
    moe_layer_start_index: int
    moe_layer_end_index: int
    """The first and the last layer with experts."""
    moe_layer_interval: int
    """Of the layers between, every so many-th has experts."""
    moe_norm_min: float
    """Gates are divided by their sum, or by this where it is smaller."""

    def layers(self) -> tuple[LayerSpec, ...]:
        first, last = self.moe_layer_start_index, self.moe_layer_end_index

        def kind(layer: int) -> str:
            among = first <= layer <= last and (layer + 1) % self.moe_layer_interval == 0
            return "block" if among else "dense"

        return tuple(LayerSpec(kind(layer)) for layer in range(self.num_hidden_layers))

    def check(self) -> None:
        if self.moe_layer_interval < 1:
            raise UserError(
                f"config.json: moe_layer_interval={self.moe_layer_interval} must be at least 1"
            )
        super().check()

    @property
    def routing(self) -> RoutingOptions:
        return RoutingOptions(
            top=self.num_experts_per_tok, normalize=True, min_sum=self.moe_norm_min
        )

    @property
    def shared_width(self) -> int | None:
        """F of the MLP that all tokens go through."""
        count = self.moe_num_shared_experts
        return self.moe_intermediate_size * count if count else None

    @property
    def experts_spec(self) -> ExpertsSpec:
        hidden, shared = self.moe_intermediate_size, self.shared_width
        return ErnieExperts(hidden=hidden, num_shared=shared, choice_bias=BIAS, wide=True)

    def block_spec(self, kind: str) -> BlockSpec:
        return BlockSpec(AttentionSpec(adjacent=True), self.mlp_spec(kind))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ErnieExperts(ExpertsSpec):
    """Experts whose choice bias is the first row of a tensor."""

    def names(self, config: Any, kind: str, layers: Sequence[int]) -> list[ParameterEntry]:
        plain = dataclasses.replace(self, choice_bias=None)
        rows = tuple(FirstRow(f"model.layers.{layer}.mlp.{self.choice_bias}") for layer in layers)
        bias = ParameterEntry(f"stack.{kind}.mlp.router.choice_bias", StackedOps(rows))
        return [*ExpertsSpec.names(plain, config, kind, layers), bias]


Model, names = SpecDecoder, spec_names
