"""Granite 3 with experts and an MLP beside them that all tokens go through (IBM 2025)."""

import dataclasses
from typing import ClassVar

from jaxtrain.models import granitemoe


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(granitemoe.Config):
    architecture: ClassVar[str] = "GraniteMoeSharedForCausalLM"
    model_type: ClassVar[str] = "granitemoeshared"

    shared_intermediate_size: int
    """F of the shared MLP; 0: there is none."""

    @property
    def shared_width(self) -> int | None:
        return self.shared_intermediate_size or None


Model, names = granitemoe.Model, granitemoe.names
