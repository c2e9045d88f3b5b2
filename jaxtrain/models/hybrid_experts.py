"""Hybrid families with a mixture of experts and one shared expert, of which a token takes its own
share."""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Self

from jaxtrain.errors import UserError
from jaxtrain.huggingface.ops import ParameterEntry
from jaxtrain.layers.linear import LayerInit
from jaxtrain.layers.moe import MoE, MoEOptions
from jaxtrain.layers.router import Router, RoutingOptions
from jaxtrain.models.hybrid import HybridConfig
from jaxtrain.models.mtp_form import QWEN
from jaxtrain.models.naming import (
    expert_names,
    fused_expert_names,
    layer_entry,
    linear_entries,
)


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


def _are_fused(tensors: Collection[str], root: str) -> bool:
    """Return True if one of the tensors behind `root` holds all experts of a layer."""
    ending = ".mlp.experts.gate_up_proj"
    return any(name.startswith(root) and name.endswith(ending) for name in tensors)


def shared_experts_mlp(config: HybridExpertsConfig, init: LayerInit, *, normalize: bool) -> MoE:
    """Experts and a shared one; normalize: the gates of a token sum to 1."""
    width, count, top = config.hidden_size, config.num_experts, config.num_experts_per_tok
    return MoE(
        Router(width, count, RoutingOptions(top=top, normalize=normalize), init=init),
        width,
        config.moe_intermediate_size,
        count,
        MoEOptions(
            activation=config.hidden_act,
            num_shared=config.shared_expert_intermediate_size,
            gate_shared=True,
        ),
        init=init,
    )


def shared_expert_names(
    config: HybridExpertsConfig, kind: str, layers: Sequence[int]
) -> list[ParameterEntry]:
    """A router, its experts in the folder's layout, the shared expert and its gate."""
    if config.fused_experts:
        entries = fused_expert_names(kind, layers, config.moe_intermediate_size)
    else:
        entries = expert_names(kind, layers, config.num_experts)
    for name in ("gate", "up", "down"):
        module = f"mlp.shared_expert.{name}_proj"
        entries += linear_entries(kind, layers, f"mlp.shared.{name}", module)
    gate = "mlp.shared_expert_gate.weight"
    return [*entries, layer_entry(kind, layers, "mlp.shared_gate.kernel", gate, transpose=True)]
