"""DeepSeek-V2 and V2-Lite (arXiv:2405.04434): latent attention, in Lite with queries made of x; a
softmax over all experts, of V2 in groups chosen by their best."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from jaxtrain.errors import UserError
from jaxtrain.huggingface.files import describe
from jaxtrain.layers.router import RoutingOptions
from jaxtrain.models.blocks import SpecDecoder, spec_names
from jaxtrain.models.latent import LatentConfig

METHODS = ("greedy", "group_limited_greedy")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(LatentConfig):
    architecture: ClassVar[str] = "DeepseekV2ForCausalLM"
    model_type: ClassVar[str] = "deepseek_v2"
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = LatentConfig.fixed | {
        "scoring_func": ("softmax",)
    }

    topk_method: str | None = "greedy"
    """One of METHODS: whether groups limit the choice."""

    def check(self) -> None:
        if self.topk_method not in METHODS:
            raise UserError(
                f"config.json: topk_method={describe(self.topk_method)} is not supported; only"
                f" {' and '.join(METHODS)} are"
            )
        super().check()

    @property
    def routing(self) -> RoutingOptions:
        """norm_topk_prob says nothing in this family."""
        limited = self.topk_method == "group_limited_greedy"
        return RoutingOptions(
            top=self.num_experts_per_tok,
            groups=(self.n_group or 1) if limited else 1,
            top_groups=(self.topk_group or 1) if limited else 1,
            strength=1,
            scale=self.routed_scaling_factor,
        )


Model, names = SpecDecoder, spec_names
