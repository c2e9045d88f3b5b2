"""DeepSeek-V2 and V2-Lite (arXiv:2405.04434): latent attention, in Lite with queries made of x; a
softmax over all experts, of V2 in groups chosen by their best."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from flax import nnx

from jaxtrain.errors import UserError
from jaxtrain.huggingface.files import describe
from jaxtrain.huggingface.ops import ParameterEntry
from jaxtrain.layers.router import RoutingOptions
from jaxtrain.models.decoder import Decoder, DecoderOptions
from jaxtrain.models.latent import LatentConfig, latent_names, make_latent_block

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


class Model(Decoder):
    def make_block(self, kind: str, config: Config, options: DecoderOptions, rngs: nnx.Rngs):
        return make_latent_block(kind, config, options, rngs)


def names(config: Config) -> list[ParameterEntry]:
    """Every parameter and the tensors of a Hugging Face folder that it is made of."""
    return latent_names(config)
