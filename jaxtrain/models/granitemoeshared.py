"""Granite 3 with experts and an MLP beside them that all tokens go through (IBM 2025)."""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from jaxtrain.huggingface.ops import ParameterEntry
from jaxtrain.models import granitemoe
from jaxtrain.models.naming import joint_mlp_names


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(granitemoe.Config):
    architecture: ClassVar[str] = "GraniteMoeSharedForCausalLM"
    model_type: ClassVar[str] = "granitemoeshared"

    shared_intermediate_size: int
    """F of the shared MLP; 0: there is none."""

    @property
    def shared_width(self) -> int | None:
        return self.shared_intermediate_size or None


class Model(granitemoe.Model):
    pass


def names(config: Config) -> list[ParameterEntry]:
    """Every parameter and the tensors of a Hugging Face folder that it is made of."""
    layers, hidden = range(config.num_hidden_layers), config.shared_intermediate_size
    shared = shared_names("block", layers, hidden, "mlp.shared") if hidden else []
    return granitemoe.names(config) + shared


def shared_names(kind: str, layers: Sequence[int], hidden: int, path: str) -> list[ParameterEntry]:
    """The shared MLP of `hidden` dims, whose gate and up are one tensor; path: where it is here."""
    modules = ("shared_mlp.input_linear", "shared_mlp.output_linear")
    return joint_mlp_names(kind, layers, hidden, path, modules)
