"""LFM3 (Liquid AI 2026): LFM2 with a window in some attention layers, which have a position
encoding of their own, norms around both layers of a block, and a gate for each head."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from jaxtrain.layers.mixer import LayerSpec
from jaxtrain.models import lfm2
from jaxtrain.models.blocks import AttentionSpec, SpecDecoder, spec_names
from jaxtrain.models.windows import FULL, SLIDING, windowed_layers

CONV = "conv"
OUT_NORMS = {"attention_out_norm": "post_operator_norm", "mlp_out_norm": "post_ffn_norm"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(lfm2.ConvConfig):
    architecture: ClassVar[str] = "Lfm3ForCausalLM"
    model_type: ClassVar[str] = "lfm3"
    modules_in_memory: ClassVar[Mapping[str, str]] = {"gate_proj": "g_proj"}
    newer: ClassVar[bool] = True
    rope_by_kind: ClassVar[bool] = True
    rope_keys: ClassVar[tuple[str, ...]] = ("partial_rotary_factor",)
    kinds: ClassVar[Mapping[str, str]] = {**lfm2.ConvConfig.kinds, SLIDING: "block"}

    sliding_window: int | None = None
    use_sandwich_norm: bool = True
    """Norms behind both layers of a block, too."""
    use_attention_gate: bool = True
    attention_bias: bool = False
    """On all four projections."""

    def layers(self) -> tuple[LayerSpec, ...]:
        types = [FULL if name == CONV else name for name in self.layer_types]
        kinds = (SLIDING, FULL)
        specs = windowed_layers(self.num_hidden_layers, types, self.sliding_window, kinds)
        return tuple(
            LayerSpec(CONV, rope="none") if name == CONV else spec
            for name, spec in zip(self.layer_types, specs, strict=True)
        )

    @property
    def block_norms(self) -> dict[str, str]:
        """The norms of a block and what they are called there."""
        return {**lfm2.NORMS, **(OUT_NORMS if self.use_sandwich_norm else {})}

    @property
    def attention_spec(self) -> AttentionSpec:
        bias, gate = self.attention_bias, "head" if self.use_attention_gate else None
        return AttentionSpec(qkv_bias=bias, out_bias=bias, qk_norm="head", output_gate=gate)


Model, names = SpecDecoder, spec_names
