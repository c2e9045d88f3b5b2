"""Command A+ (Cohere 2026): Command A with experts in the place of most MLPs, and in some folders
RMSNorm in the place of LayerNorm."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from jaxtrain.errors import UserError
from jaxtrain.layers.mixer import LayerSpec
from jaxtrain.layers.norm import RMSNorm, ScaledLayerNorm
from jaxtrain.layers.router import RoutingOptions
from jaxtrain.models import cohere
from jaxtrain.models.blocks import (
    BlockSpec,
    DenseSpec,
    ExpertsSpec,
    MLPSpec,
    SpecDecoder,
    spec_names,
)
from jaxtrain.models.experts import ExpertsConfig, list_experts
from jaxtrain.models.windows import FULL, SLIDING, name_layers, windowed_layers

DENSE = "first_k_dense_replace"
PATTERN = "sliding_window_pattern"
CHOICES = {
    "expert_selection_fn": ("softmax", "sigmoid"),
    "shared_expert_combination_strategy": ("average", "sum"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(ExpertsConfig, cohere.CohereConfig):
    architecture: ClassVar[str] = "Cohere2MoeForCausalLM"
    model_type: ClassVar[str] = "cohere2_moe"
    renamed: ClassVar[Mapping[str, str]] = {
        **cohere.CohereConfig.renamed,
        "num_local_experts": "num_experts",
        "layer_norm_eps": "rms_norm_eps",
    }
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {PATTERN: ()}

    layer_norm_eps: float | None = None
    """Of the LayerNorms that RMSNorms with rms_norm_eps replace; None: the norms are LayerNorms."""
    num_shared_experts: int
    """Experts that every token goes through: one MLP of so many times intermediate_size."""
    shared_expert_combination_strategy: str
    expert_selection_fn: str
    norm_topk_prob: bool
    """True if sigmoids of the chosen experts are divided by their sum."""
    prefix_dense_intermediate_size: int | None = None
    """F of the dense layers; None: intermediate_size, which is that of an expert."""
    prefix_dense_sliding_window_pattern: int
    """1: dense layers rotate queries and keys although they have no window."""
    sliding_window: int | None = None
    layer_types: tuple[str, ...]
    mlp_layer_types: tuple[str, ...]

    @property
    def norm(self) -> type[RMSNorm]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return ScaledLayerNorm if self.layer_norm_eps is None else RMSNorm

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        config = super().from_hf(name_kinds(raw))
        return config if config.layer_norm_eps is None else config.exchange_eps()

    def to_hf(self) -> dict[str, Any]:
        raw = super().to_hf()
        if self.layer_norm_eps is not None:
            raw |= {"layer_norm_eps": self.layer_norm_eps, "rms_norm_eps": self.rms_norm_eps}
        return raw

    def exchange_eps(self) -> Self:
        """Return the config with the eps of the norms that the model has as rms_norm_eps."""
        eps, aside = self.layer_norm_eps, self.rms_norm_eps
        return dataclasses.replace(self, rms_norm_eps=eps, layer_norm_eps=aside)

    def check(self) -> None:
        super().check()
        for key, allowed in CHOICES.items():
            if getattr(self, key) not in allowed:
                raise UserError(
                    f"config.json: {key}={getattr(self, key)!r}; supported: {', '.join(allowed)}"
                )

    def layers(self) -> tuple[LayerSpec, ...]:
        specs = windowed_layers(self.num_hidden_layers, self.layer_types, self.sliding_window)
        specs = list_experts(specs, self.mlp_layer_types)
        rotates = "dense" if self.prefix_dense_sliding_window_pattern == 1 else ""
        return tuple(
            dataclasses.replace(spec, rope="none")
            if spec.window is None and spec.kind != rotates
            else spec
            for spec in specs
        )

    @property
    def routing(self) -> RoutingOptions:
        # A softmax of the chosen logits alone is one of all, divided by its sum.
        score = self.expert_selection_fn
        normalize = score == "softmax" or self.norm_topk_prob
        return RoutingOptions(top=self.num_experts_per_tok, score=score, normalize=normalize)

    @property
    def experts_spec(self) -> ExpertsSpec:
        return ExpertsSpec(
            hidden=self.intermediate_size,
            num_shared=self.intermediate_size * self.num_shared_experts or None,
            mean_shared=self.shared_expert_combination_strategy == "average",
        )

    def mlp_spec(self, kind: str) -> MLPSpec:
        dense = DenseSpec(hidden=self.prefix_dense_intermediate_size or None)
        return dense if kind == "dense" else self.experts_spec

    def block_spec(self, kind: str) -> BlockSpec:
        spec = cohere.CohereConfig.block_spec(self, kind)
        return dataclasses.replace(spec, mlp=self.mlp_spec(kind))


def name_kinds(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes with the lists of layers that `first_k_dense_replace` and the patterns
    of windows stand for, where a folder has none."""
    raw = dict(raw)
    dense, count = raw.pop(DENSE, None) or 0, raw.get("num_hidden_layers")
    if type(dense) is not int or dense < 0 or type(count) is not int:
        return raw | ({DENSE: dense} if dense else {})
    dense = min(dense, count)
    if raw.get("mlp_layer_types") is None:
        raw["mlp_layer_types"] = ["dense"] * dense + ["sparse"] * (count - dense)
    if raw.get("layer_types") is None:
        # Windows of the dense layers follow a pattern of their own, and the others' starts anew.
        listed = []
        for key, size, every in (
            ("prefix_dense_" + PATTERN, dense, 1),
            (PATTERN, count - dense, 4),
        ):
            part = {key: raw.get(key), "num_hidden_layers": size}
            name_layers(part, (key,), every, (SLIDING, FULL))
            listed += part["layer_types"]
        raw["layer_types"] = listed
    return raw


Model, names = SpecDecoder, spec_names
