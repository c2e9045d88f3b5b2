"""Granite 3 with experts (IBM 2024): Granite whose MLP is a mixture of experts, and in the later
"shared" form an MLP beside them that all tokens go through."""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from jaxtrain.huggingface.ops import ParameterEntry
from jaxtrain.models.blocks import ExpertsSpec, MLPSpec, SpecDecoder, spec_names
from jaxtrain.models.experts import ExpertsConfig, FusedExpertsSpec
from jaxtrain.models.granite import GraniteConfig
from jaxtrain.models.naming import joint_mlp_names

SHARED = ("shared_mlp.input_linear", "shared_mlp.output_linear")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GraniteExperts(FusedExpertsSpec):
    """Experts as the Granites call them; gate and up of the shared one are one tensor, too."""

    module: str = "block_sparse_moe"
    router: str = "router.layer"
    tensors: tuple[str, str] = ("input_linear.weight", "output_linear.weight")

    def shared_names(self, kind: str, layers: Sequence[int]) -> list[ParameterEntry]:
        if self.num_shared is None:
            return []
        return joint_mlp_names(kind, layers, self.num_shared, "mlp.shared", SHARED)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(ExpertsConfig, GraniteConfig):
    """F of an expert is intermediate_size."""

    architecture: ClassVar[str] = "GraniteMoeForCausalLM"
    model_type: ClassVar[str] = "granitemoe"

    @property
    def shared_width(self) -> int | None:
        """F of the MLP that all tokens go through; None: there is none."""
        return None

    @property
    def experts_spec(self) -> ExpertsSpec:
        return GraniteExperts(hidden=self.intermediate_size, num_shared=self.shared_width)

    @property
    def branch_spec(self) -> MLPSpec:
        return self.experts_spec


Model, names = SpecDecoder, spec_names
