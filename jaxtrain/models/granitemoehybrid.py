"""Granite 4 (IBM 2025): Mamba-2 or attention, and behind it a gated MLP, alone or beside experts;
hybrids without position encoding, pure transformers with rotation."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.huggingface.ops import ParameterEntry
from jaxtrain.layers.mixer import LayerSpec
from jaxtrain.layers.router import RoutingOptions
from jaxtrain.models.blocks import BlockSpec, DenseSpec, MLPSpec, SpecDecoder, spec_names
from jaxtrain.models.granite import GraniteConfig
from jaxtrain.models.granitemoe import SHARED, GraniteExperts
from jaxtrain.models.mamba import Mamba2Config, MambaSpec
from jaxtrain.models.naming import joint_mlp_names

KINDS = {
    "mamba": "mamba",
    "linear_attention": "mamba",
    "attention": "block",
    "full_attention": "block",
}
"""Entries of `layer_types`, old and new, and under which name such a layer is stored here."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Mamba2Config, GraniteConfig):
    architecture: ClassVar[str] = "GraniteMoeHybridForCausalLM"
    model_type: ClassVar[str] = "granitemoehybrid"
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "init_method": ("mup",),
        "normalization_function": ("rmsnorm",),
        "mamba_chunk_size": (),
    }

    layer_types: tuple[str, ...]
    position_embedding_type: str | None = None
    """ "rope", or anything else for none."""
    shared_intermediate_size: int
    """F of the MLP that all tokens go through; intermediate_size is that of an expert."""
    num_local_experts: int
    """0: the shared MLP is all there is."""
    num_experts_per_tok: int
    router_aux_loss_coef: float = 0.001
    """Only carried along: model.router_aux_loss_coef says what a run trains with."""
    output_router_logits: bool = False
    """Only carried along."""

    def to_hf(self) -> dict[str, Any]:
        old = {"linear_attention": "mamba", "full_attention": "attention"}
        raw = super().to_hf()
        # The spelling of the Hub, which transformers reads in every version.
        raw["layer_types"] = [old.get(name, name) for name in self.layer_types]
        return raw

    def check(self) -> None:
        if len(self.layer_types) != self.num_hidden_layers or not set(self.layer_types) <= {*KINDS}:
            raise UserError(
                f"config.json: layer_types must name {self.num_hidden_layers} layers"
                f" (num_hidden_layers), each one of {', '.join(KINDS)}"
            )
        if not self.shared_intermediate_size:
            raise UserError(
                "config.json: shared_intermediate_size=0 is not supported in this family, whose"
                " tokens all go through the shared MLP"
            )
        top, count = self.num_experts_per_tok, self.num_local_experts
        if count and not 1 <= top <= count:
            raise UserError(
                f"config.json: num_experts_per_tok={top} must be from 1 to the {count} experts"
            )
        super().check()

    def layers(self) -> tuple[LayerSpec, ...]:
        rope = "default" if self.position_embedding_type == "rope" else "none"
        return tuple(LayerSpec(KINDS[name], rope=rope) for name in self.layer_types)

    def encodings(self) -> dict[str, tuple[np.ndarray, float]]:
        return super().encodings() if self.position_embedding_type == "rope" else {}

    @property
    def experts_per_token(self) -> tuple[int, int] | None:
        count = self.num_local_experts
        return (self.num_experts_per_tok, count) if count else None

    @property
    def routing(self) -> RoutingOptions:
        """Options of the router: a softmax over the chosen experts."""
        return RoutingOptions(top=self.num_experts_per_tok, normalize=True)

    @property
    def branch_spec(self) -> MLPSpec:
        shared = self.shared_intermediate_size
        if self.num_local_experts:
            return GraniteExperts(hidden=self.intermediate_size, num_shared=shared)
        return SharedSpec(hidden=shared)

    def block_spec(self, kind: str) -> BlockSpec:
        spec = super().block_spec(kind)
        return dataclasses.replace(spec, mixer=MambaSpec()) if kind == "mamba" else spec


class SharedSpec(DenseSpec):
    """The shared MLP where there are no experts."""

    def names(self, config: Any, kind: str, layers: Sequence[int]) -> list[ParameterEntry]:
        return joint_mlp_names(kind, layers, config.shared_intermediate_size, modules=SHARED)


Model, names = SpecDecoder, spec_names
