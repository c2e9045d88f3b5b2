"""Hybrid families with a mixture of experts and one shared expert, of which a token takes its own
share."""

import dataclasses
from collections.abc import Collection
from typing import Self

from jaxtrain.errors import UserError
from jaxtrain.layers.router import RoutingOptions
from jaxtrain.models.blocks import ExpertsSpec
from jaxtrain.models.experts import FusedExpertsSpec
from jaxtrain.models.hybrid import HybridConfig
from jaxtrain.models.mtp_form import QWEN


@dataclasses.dataclass(frozen=True, kw_only=True)
class HybridExpertsConfig(HybridConfig):
    """A HybridConfig with experts."""

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    router_aux_loss_coef: float = 0.001
    """Only carried along: model.router_aux_loss_coef says what a run trains with."""
    output_router_logits: bool = False
    """Only carried along."""
    fused_experts: bool = False
    """Whether a folder has all experts of a layer in one tensor."""

    def fit(self, tensors: Collection[str]) -> Self:
        """Experts are stored in two ways, which the folder tells."""
        return dataclasses.replace(
            super().fit(tensors), fused_experts=_are_fused(tensors, "model.")
        )

    def inner_config(self, tensors: Collection[str]) -> Self:
        inner, fused = super().inner_config(tensors), _are_fused(tensors, QWEN.root)
        return dataclasses.replace(inner, fused_experts=fused)

    def check(self) -> None:
        super().check()
        top, count = self.num_experts_per_tok, self.num_experts
        if not 1 <= top <= count:
            raise UserError(
                f"config.json: num_experts_per_tok={top} must be from 1 to the {count} experts"
            )

    @property
    def experts_per_token(self) -> tuple[int, int]:
        return self.num_experts_per_tok, self.num_experts

    @property
    def routing(self) -> RoutingOptions:
        """Options of the router: a softmax over the chosen experts."""
        return RoutingOptions(top=self.num_experts_per_tok, normalize=True)

    @property
    def branch_spec(self) -> ExpertsSpec:
        return (FusedExpertsSpec if self.fused_experts else ExpertsSpec)(
            hidden=self.moe_intermediate_size,
            num_shared=self.shared_expert_intermediate_size,
            shared_name="shared_expert",
            gate_shared=True,
        )


def _are_fused(tensors: Collection[str], root: str) -> bool:
    """Return True if one of the tensors behind `root` holds all experts of a layer."""
    ending = ".mlp.experts.gate_up_proj"
    return any(name.startswith(root) and name.endswith(ending) for name in tensors)
