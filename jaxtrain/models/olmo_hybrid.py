"""OLMo Hybrid (Ai2 2026): linear attention whose decays may change a state's sign, behind norms,
and OLMo 3's full attention without windows in every fourth layer; published models rotate nothing.

transformers writes other names of norms than the published folders have, and cuts the convolutions
of a layer into three equal parts; such folders load if queries, keys and values have as many dims.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np

from jaxtrain.huggingface.ops import ParameterEntry
from jaxtrain.layers.gated_delta import SplitGatedDelta
from jaxtrain.layers.linear import LayerInit
from jaxtrain.layers.mixer import LayerSpec
from jaxtrain.layers.norm import PreciseRMSNorm, RMSNorm
from jaxtrain.models.blocks import AttentionSpec, BlockSpec, SpecDecoder, spec_names
from jaxtrain.models.decoder import DecoderOptions
from jaxtrain.models.decoder_config import DecoderConfig
from jaxtrain.models.hybrid import FULL, LINEAR, check_linear_layers, read_sizes
from jaxtrain.models.naming import POST_NORMS, layer_entry, linear_entries

LINEAR_NORMS = {"attention_norm": "attention_layer_norm", "mlp_norm": "feedforward_layer_norm"}
RESAVED_NORMS = {**POST_NORMS, "attention_out_norm": LINEAR_NORMS["mlp_norm"]}
"""Norms of full attention as transformers writes them."""


class SplitDeltaSpec:
    """Linear attention whose inputs and convolutions are a tensor each."""

    def build(self, config: "Config", options: DecoderOptions, init: LayerInit) -> SplitGatedDelta:
        scale = 2.0 if config.linear_allow_neg_eigval else 1.0
        sizes = read_sizes(config)
        # The norm behind the rule has this epsilon, whatever the model's is.
        return SplitGatedDelta(
            config.hidden_size, sizes, norm_eps=1e-5, beta_scale=scale, init=init
        )

    def names(self, config: "Config", kind: str, layers: Sequence[int]) -> list[ParameterEntry]:
        tensors = {"A_log": "A_log", "dt_bias": "dt_bias", "norm.scale": "o_norm.weight"}
        tensors |= {f"{part}_conv": f"{part}_conv1d.weight" for part in "qkv"}
        modules = dict(zip(("q", "k", "v", "z", "b", "a", "out"), "qkvgbao", strict=True))
        entries = [
            layer_entry(kind, layers, f"attention.{path}", f"linear_attn.{name}")
            for path, name in tensors.items()
        ]
        return entries + [
            entry
            for path, name in modules.items()
            for entry in linear_entries(
                kind, layers, f"attention.{path}", f"linear_attn.{name}_proj"
            )
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    architecture: ClassVar[str] = "OlmoHybridForCausalLM"
    model_type: ClassVar[str] = "olmo_hybrid"
    newer: ClassVar[bool] = True
    norm: ClassVar[type[RMSNorm]] = PreciseRMSNorm
    activations: ClassVar[Collection[str]] = ("silu",)
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **dict.fromkeys(("linear_a_log_min", "linear_a_log_max", "linear_dt_init_floor"), ()),
        **dict.fromkeys(("linear_dt_min", "linear_dt_max"), ()),
    }

    attention_bias: bool = False
    layer_types: tuple[str, ...]
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    linear_allow_neg_eigval: bool = True
    """Beta is between 0 and 2 in place of 0 and 1."""
    resaved: bool = False
    """True for the names of a folder that transformers wrote."""

    def fit(self, tensors: Collection[str]) -> Self:
        full = self.layer_types.index(FULL)
        name = f"model.layers.{full}.{RESAVED_NORMS['attention_out_norm']}.weight"
        return dataclasses.replace(self, resaved=name in tensors)

    def to_hf(self) -> dict[str, Any]:
        """Return the content of a config.json, in which positions that are not rotated have a base
        of null: transformers takes what is absent for 10,000."""
        raw = super().to_hf()
        return raw | {"rope_parameters": {"rope_theta": None, **dict(self.rope)}}

    def check(self) -> None:
        check_linear_layers(self)
        super().check()

    @property
    def rotates(self) -> bool:
        """True if the layers of full attention rotate queries and keys."""
        return "rope_theta" in dict(self.rope)

    def encodings(self) -> dict[str, tuple[np.ndarray, float]]:
        return super().encodings() if self.rotates else {}

    def layers(self) -> tuple[LayerSpec, ...]:
        full = LayerSpec(rope="default" if self.rotates else "none")
        return tuple(LayerSpec("linear") if t == LINEAR else full for t in self.layer_types)

    def block_spec(self, kind: str) -> BlockSpec:
        if kind == "linear":
            return BlockSpec(SplitDeltaSpec(), norms=LINEAR_NORMS)
        bias = self.attention_bias
        attention = AttentionSpec(qkv_bias=bias, out_bias=bias, qk_norm="all_heads")
        return BlockSpec(attention, norms=RESAVED_NORMS if self.resaved else POST_NORMS)


Model, names = SpecDecoder, spec_names
