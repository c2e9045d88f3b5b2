"""Jamba (AI21 2024, arXiv:2403.19887): Mamba, attention without position encoding in every so
many-th layer, and experts in place of the MLP in every so many-th."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np

from jaxtrain.huggingface.ops import ParameterEntry
from jaxtrain.layers.linear import LayerInit
from jaxtrain.layers.mamba import Mamba, ScanSizes
from jaxtrain.layers.mixer import LayerSpec
from jaxtrain.layers.router import RoutingOptions
from jaxtrain.models.blocks import (
    AttentionSpec,
    BlockSpec,
    DenseSpec,
    ExpertsSpec,
    MLPSpec,
    SpecDecoder,
    spec_names,
)
from jaxtrain.models.decoder import DecoderOptions
from jaxtrain.models.experts import ExpertsConfig
from jaxtrain.models.naming import layer_entry, linear_entries, row_names

NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "pre_ff_layernorm"}
MODULE = "feed_forward"
"""Name of the MLP and of the experts."""
CARRIED = {
    *("calc_logits_for_entire_prompt", "n_ctx", "num_logits_to_keep"),
    *("use_associative_scan", "use_mamba_kernels", "use_mambapy"),
}
"""Attributes that do not change what is computed here."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(ExpertsConfig):
    architecture: ClassVar[str] = "JambaForCausalLM"
    model_type: ClassVar[str] = "jamba"
    final_norm_name: ClassVar[str] = "final_layernorm"
    activations: ClassVar[Collection[str]] = ("silu", "swish")
    """That of the convolution, too."""
    renamed: ClassVar[Mapping[str, str]] = {"num_local_experts": "num_experts"}
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **dict.fromkeys(CARRIED, ()),
        "mamba_inner_layernorms": (True,),
    }

    attn_layer_period: int
    """Every so many-th layer has attention."""
    attn_layer_offset: int
    """Index of the first of them."""
    expert_layer_period: int
    """Every so many-th layer has experts, unless there is only one."""
    expert_layer_offset: int
    mamba_d_state: int
    mamba_d_conv: int
    mamba_expand: int
    mamba_dt_rank: int
    mamba_conv_bias: bool
    mamba_proj_bias: bool

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        automatic = raw.get("mamba_dt_rank") == "auto"
        return super().from_hf(
            {k: v for k, v in raw.items() if k != "mamba_dt_rank" or not automatic}
        )

    @property
    def sizes(self) -> ScanSizes:
        """Sizes of the Mamba layers."""
        return ScanSizes(
            self.mamba_expand * self.hidden_size,
            self.mamba_d_state,
            self.mamba_dt_rank,
            self.mamba_d_conv,
            self.mamba_conv_bias,
            self.mamba_proj_bias,
        )

    def layers(self) -> tuple[LayerSpec, ...]:
        kinds = [
            "block" if layer % self.attn_layer_period == self.attn_layer_offset else "mamba"
            for layer in range(self.num_hidden_layers)
        ]
        for layer in range(self.num_hidden_layers):
            sparse = layer % self.expert_layer_period == self.expert_layer_offset
            if not sparse or self.num_local_experts < 2:
                kinds[layer] += "_dense"
        return tuple(LayerSpec(kind, rope="none") for kind in kinds)

    def encodings(self) -> dict[str, tuple[np.ndarray, float]]:
        return {}

    @property
    def experts_per_token(self) -> tuple[int, int] | None:
        sparse = any(not spec.kind.endswith("dense") for spec in self.layers())
        return super().experts_per_token if sparse else None

    @property
    def routing(self) -> RoutingOptions:
        return RoutingOptions(top=self.num_experts_per_tok, normalize=False)

    @property
    def experts_spec(self) -> ExpertsSpec:
        return ExpertsSpec(hidden=self.intermediate_size, module=MODULE, router="router")

    def mlp_spec(self, kind: str) -> MLPSpec:
        return DenseSpec(module=MODULE) if kind.endswith("dense") else self.experts_spec

    def block_spec(self, kind: str) -> BlockSpec:
        mixer = MambaSpec() if kind.startswith("mamba") else AttentionSpec()
        return BlockSpec(mixer, self.mlp_spec(kind), norms=NORMS)


class MambaSpec:
    """Mamba of the config's sizes."""

    def build(self, config: Config, options: DecoderOptions, init: LayerInit) -> Mamba:
        return Mamba(config.hidden_size, config.sizes, norm_eps=config.rms_norm_eps, init=init)

    def names(self, config: Config, kind: str, layers: Sequence[int]) -> list[ParameterEntry]:
        sizes, bias = config.sizes, config.mamba_proj_bias
        F = sizes.num_channels
        runs = {"attention.x": ((0, F),), "attention.z": ((F, F),)}
        tensors = {"conv": "conv1d.weight", "A_log": "A_log", "D": "D", "dt_bias": "dt_proj.bias"}
        tensors |= {"conv_bias": "conv1d.bias"} if sizes.conv_bias else {}
        tensors |= {f"{part}_norm.scale": f"{part}_layernorm.weight" for part in ("dt", "b", "c")}
        dt = ("attention.dt_kernel", "mamba.dt_proj.weight")
        return [
            *row_names(kind, layers, "mamba.in_proj", runs, bias=bias),
            *linear_entries(kind, layers, "attention.select", "mamba.x_proj"),
            *linear_entries(kind, layers, "attention.out", "mamba.out_proj", bias=bias),
            layer_entry(kind, layers, *dt, transpose=True),
            *(
                layer_entry(kind, layers, f"attention.{path}", f"mamba.{name}")
                for path, name in tensors.items()
            ),
        ]


Model, names = SpecDecoder, spec_names
