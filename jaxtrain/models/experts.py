"""What the families with a mixture of experts have in their config.json alike."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

from jaxtrain.errors import UserError
from jaxtrain.models.decoder import DecoderConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsConfig(DecoderConfig):
    """A DecoderConfig with experts."""

    num_local_experts: int
    """`num_experts` in the files of transformers 4."""
    num_experts_per_tok: int
    router_aux_loss_coef: float = 0.001
    """Only carried along: model.router_aux_loss_coef says what a run trains with."""
    output_router_logits: bool = False
    """Only carried along."""

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        """As for every decoder; `num_experts` is another name of `num_local_experts`."""
        raw = dict(raw)
        old = raw.pop("num_experts", None)
        if old is not None and raw.setdefault("num_local_experts", old) != old:
            raise UserError(
                f"config.json: num_experts={old} and num_local_experts="
                f"{raw['num_local_experts']} are two names of one number; remove one"
            )
        return super().from_hf(raw)

    def to_hf(self) -> dict[str, Any]:
        return super().to_hf() | {"num_experts": self.num_local_experts}

    def check(self) -> None:
        super().check()
        top, count = self.num_experts_per_tok, self.num_local_experts
        if not 1 <= top <= count:
            raise UserError(
                f"config.json: num_experts_per_tok={top} must be from 1 to the {count} experts"
            )

    @property
    def experts_per_token(self) -> tuple[int, int]:
        return self.num_experts_per_tok, self.num_local_experts
