"""The config.json attributes shared by families with a mixture of experts."""

import dataclasses
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Self

from jaxtrain.errors import UserError
from jaxtrain.huggingface.files import describe
from jaxtrain.huggingface.ops import ParameterEntry
from jaxtrain.layers.mixer import LayerSpec
from jaxtrain.layers.router import RoutingOptions
from jaxtrain.models.blocks import DenseSpec, ExpertsSpec, MLPSpec
from jaxtrain.models.decoder_config import DecoderConfig
from jaxtrain.models.naming import (
    CHOICE_BIAS,
    fused_expert_names,
    linear_entries,
    transpose_experts,
)

ALIASES = {
    "num_local_experts": (
        *("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    ),
    "num_experts_per_tok": ("num_experts_per_tok", "top_k_experts", "moe_k", "moe_topk"),
}
"""What families and versions of transformers call these fields."""
ABSENT = ("router_aux_loss_coef", "output_router_logits", "num_nextn_predict_layers")
"""Fields that some families do not have at all."""

MLP_KINDS = {"dense": "dense", "sparse": "block"}
"""Entries of `mlp_layer_types`, and under which name such a layer is stored here."""


def list_experts(
    specs: Sequence[LayerSpec], mlp_layer_types: Sequence[str]
) -> tuple[LayerSpec, ...]:
    """Return the layers with the kinds that `mlp_layer_types` gives them. Raises UserError for
    unknown entries, or unless there is one for each layer."""
    if len(mlp_layer_types) != len(specs) or not set(mlp_layer_types) <= {*MLP_KINDS}:
        raise UserError(
            f"config.json: mlp_layer_types must name {len(specs)} layers (num_hidden_layers), each"
            f" {' or '.join(MLP_KINDS)}"
        )
    return tuple(
        dataclasses.replace(spec, kind=MLP_KINDS[name])
        for spec, name in zip(specs, mlp_layer_types, strict=True)
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsConfig(DecoderConfig):
    """A DecoderConfig with experts; `renamed` says which of ALIASES the family writes."""

    num_local_experts: int
    num_experts_per_tok: int
    router_aux_loss_coef: float | None = None
    """Only carried along: model.router_aux_loss_coef says what a run trains with."""
    output_router_logits: bool | None = None
    """Only carried along."""

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        """Read a config.json that uses any of ALIASES."""
        return super().from_hf(cls.join_aliases(raw))

    @classmethod
    def join_aliases(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Return the attributes with one name in place of any of ALIASES."""
        raw = dict(raw)
        for field, names in ALIASES.items():
            stated = {name: raw.pop(name) for name in names if raw.get(name) is not None}
            values = list(stated.values())
            if any(value != values[0] for value in values):
                pairs = " and ".join(f"{name}={describe(value)}" for name, value in stated.items())
                raise UserError(f"config.json: {pairs} are two names of one number; remove one")
            if stated:
                raw[cls.renamed.get(field, field)] = values[0]
        return raw

    def to_hf(self) -> dict[str, Any]:
        raw = super().to_hf()
        return {key: v for key, v in raw.items() if key not in ABSENT or v is not None}

    def check(self) -> None:
        super().check()
        top, count = self.num_experts_per_tok, self.num_local_experts
        if self.experts_per_token and not 1 <= top <= count:
            named = self.renamed.get("num_experts_per_tok", "num_experts_per_tok")
            raise UserError(f"config.json: {named}={top} must be from 1 to the {count} experts")

    @property
    def routing(self) -> RoutingOptions:
        """Router options; by default a softmax over the chosen experts."""
        return RoutingOptions(top=self.num_experts_per_tok, normalize=True)

    @property
    def experts_per_token(self) -> tuple[int, int]:
        return self.num_experts_per_tok, self.num_local_experts

    @property
    @abstractmethod
    def experts_spec(self) -> ExpertsSpec:
        """Declaration of the experts of a layer."""

    def mlp_spec(self, kind: str) -> MLPSpec:
        """Return the declaration of the MLP of a kind of layers: experts, or a dense one if the
        kind's name ends with "dense"."""
        return DenseSpec() if kind.endswith("dense") else self.experts_spec


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseStepConfig(ExpertsConfig):
    """Experts in every so many-th layer, dense ones between (Qwen)."""

    moe_intermediate_size: int
    """F of an expert; intermediate_size is that of a dense layer."""
    norm_topk_prob: bool = False
    """Whether the gates of a token sum to 1."""
    decoder_sparse_step: int = 1
    """Every so many-th layer has experts."""
    mlp_only_layers: tuple[int, ...] = ()
    """Layers that are dense nevertheless."""

    def kind(self, layer: int) -> str:
        """ "block" of a layer with experts, or "dense"."""
        sparse = (layer + 1) % self.decoder_sparse_step == 0
        return "block" if sparse and layer not in self.mlp_only_layers else "dense"

    def layers(self) -> tuple[LayerSpec, ...]:
        return tuple(LayerSpec(self.kind(layer)) for layer in range(self.num_hidden_layers))

    @property
    def routing(self) -> RoutingOptions:
        return RoutingOptions(top=self.num_experts_per_tok, normalize=self.norm_topk_prob)

    @property
    def experts_spec(self) -> ExpertsSpec:
        return ExpertsSpec(hidden=self.moe_intermediate_size)

    def check(self) -> None:
        if self.decoder_sparse_step < 1:
            raise UserError(
                f"config.json: decoder_sparse_step={self.decoder_sparse_step} must be at least 1"
            )
        super().check()


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedExpertsConfig(ExpertsConfig):
    """Experts in DeepSeek-V3's form (arXiv:2412.19437): some dense layers, then experts in groups,
    chosen by sigmoids with a correction bias, beside shared ones."""

    renamed: ClassVar[Mapping[str, str]] = {"num_local_experts": "n_routed_experts"}
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
    }
    wide_router: ClassVar[bool] = True
    """Whether the router multiplies in float32."""

    moe_intermediate_size: int
    """F of an expert; intermediate_size is that of a dense layer."""
    n_shared_experts: int | None = None
    """Experts that every token goes through: one MLP of so many times F."""
    routed_scaling_factor: float = 1.0
    n_group: int | None = 1
    topk_group: int | None = 1
    norm_topk_prob: bool | None = True
    """Whether the gates of a token sum to 1 before they are scaled."""
    first_k_dense_replace: int | None = 0
    """How many of the first layers are dense."""
    num_nextn_predict_layers: int | None = None
    """Layers that predict tokens further ahead (arXiv:2412.19437, section 2.2), behind the others
    in a folder; they are carried along unless they are trained."""

    @property
    def carries(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        first, count = self.num_hidden_layers, self.num_nextn_predict_layers or 0
        return () if self.mtp else tuple(f"model.layers.{first + n}." for n in range(count))

    @property
    def goes_stale(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.carries

    @property
    def num_predicted(self) -> int | None:
        return self.num_nextn_predict_layers

    def inner_config(self, tensors: Collection[str]) -> Self:
        """The layer has experts, as those before it have."""
        counts = dict.fromkeys(("first_k_dense_replace", "num_nextn_predict_layers"), 0)
        return dataclasses.replace(self, num_hidden_layers=1, **counts)

    def count_heads(self) -> dict[str, Any]:
        return {"num_nextn_predict_layers": 1}

    def layers(self) -> tuple[LayerSpec, ...]:
        dense, count = self.first_k_dense_replace or 0, self.num_hidden_layers
        return tuple(LayerSpec("dense" if layer < dense else "block") for layer in range(count))

    def check(self) -> None:
        super().check()
        top, count = self.num_experts_per_tok, self.num_local_experts
        groups, open_groups = self.n_group or 1, self.topk_group or 1
        if count % groups or not 1 <= open_groups <= groups:
            raise UserError(
                f"config.json: n_group={groups} must divide the {count} experts"
                f" (n_routed_experts), and topk_group={open_groups} be from 1 to n_group"
            )
        if top > count // groups * open_groups:
            raise UserError(
                f"config.json: num_experts_per_tok={top} must be from 1 to the"
                f" {count // groups * open_groups} experts of topk_group groups"
            )

    @property
    def routing(self) -> RoutingOptions:
        return RoutingOptions(
            top=self.num_experts_per_tok,
            score="sigmoid",
            groups=self.n_group or 1,
            top_groups=self.topk_group or 1,
            normalize=bool(self.norm_topk_prob),
            scale=self.routed_scaling_factor,
        )

    @property
    def shared_width(self) -> int | None:
        """F of the MLP that all tokens go through."""
        count = self.n_shared_experts
        return self.moe_intermediate_size * count if count else None

    @property
    def experts_spec(self) -> ExpertsSpec:
        return ExpertsSpec(
            hidden=self.moe_intermediate_size,
            num_shared=self.shared_width,
            choice_bias=CHOICE_BIAS if self.routing.score == "sigmoid" else None,
            wide=self.wide_router,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class FusedExpertsSpec(ExpertsSpec):
    """Experts whose gates and ups are one tensor of a folder, and whose downs are another."""

    tensors: tuple[str, str] = ("experts.gate_up_proj", "experts.down_proj")
    swapped: bool = False
    """The tensors are [E, in, out] in place of [E, out, in]."""

    def names(self, config: Any, kind: str, layers: Sequence[int]) -> list[ParameterEntry]:
        entries = fused_expert_names(
            kind,
            layers,
            self.hidden,
            module=f"{self.module}.",
            router=self.router,
            tensors=self.tensors,
        )
        if self.swapped:
            entries = list(map(transpose_experts, entries))
        return entries + self.shared_names(kind, layers) + self.gate_names(kind, layers)

    def shared_names(self, kind: str, layers: Sequence[int]) -> list[ParameterEntry]:
        """List the parameters of the shared expert, if there is one."""
        return [
            entry
            for path, tensor in (self.parts if self.num_shared else {}).items()
            for entry in linear_entries(
                kind, layers, f"mlp.shared.{path}", f"{self.module}.{self.shared_name}.{tensor}"
            )
        ]
