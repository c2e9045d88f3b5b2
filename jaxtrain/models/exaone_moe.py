"""K-EXAONE (LG AI Research 2026): EXAONE 4's attention behind norms before both layers, and in most
layers DeepSeek-V3's experts."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from flax import nnx

from jaxtrain.huggingface.ops import ParameterEntry
from jaxtrain.layers.mixer import LayerSpec
from jaxtrain.models import exaone4
from jaxtrain.models.blocks import attention_block, dense_mlp, grouped_experts_mlp
from jaxtrain.models.decoder import Decoder, DecoderOptions
from jaxtrain.models.experts import GroupedExpertsConfig, list_experts
from jaxtrain.models.naming import attention_names, expert_names, mlp_names, outer_names


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(GroupedExpertsConfig, exaone4.Config):
    architecture: ClassVar[str] = "ExaoneMoeForCausalLM"
    model_type: ClassVar[str] = "exaone_moe"
    renamed: ClassVar[Mapping[str, str]] = {
        "num_local_experts": "num_experts",
        "n_shared_experts": "num_shared_experts",
    }
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **exaone4.Config.fixed,
        **GroupedExpertsConfig.fixed,
    }
    carries: ClassVar[tuple[str, ...]] = ("mtp.",)  # pyright: ignore[reportIncompatibleVariableOverride]
    goes_stale: ClassVar[tuple[str, ...]] = carries  # pyright: ignore[reportIncompatibleVariableOverride]

    mlp_layer_types: tuple[str, ...]

    def layers(self) -> tuple[LayerSpec, ...]:
        return list_experts(exaone4.Config.layers(self), self.mlp_layer_types)


class Model(Decoder):
    def make_block(self, kind: str, config: Config, options: DecoderOptions, rngs: nnx.Rngs):
        make_mlp = dense_mlp if kind == "dense" else grouped_experts_mlp
        return attention_block(config, options, rngs, qk_norm="head", make_mlp=make_mlp)


def names(config: Config) -> list[ParameterEntry]:
    """Every parameter and the tensors of a Hugging Face folder that it is made of."""
    entries = outer_names(config)
    for kind, layers in config.layers_by_kind().items():
        entries += attention_names(kind, layers, qk_norm=True)
        if kind == "dense":
            entries += mlp_names(kind, layers)
            continue
        entries += expert_names(
            kind,
            layers,
            config.num_local_experts,
            choice_bias="e_score_correction_bias",
            shared="shared_experts" if config.n_shared_experts else None,
        )
    return entries
