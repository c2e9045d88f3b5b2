"""Bamba (IBM 2024): Mamba-2, and attention in some layers, half of each head rotated."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from jaxtrain.layers.mamba2 import MambaOptions
from jaxtrain.layers.mixer import LayerSpec
from jaxtrain.models.blocks import AttentionSpec, BlockSpec, DenseSpec, SpecDecoder, spec_names
from jaxtrain.models.mamba import Mamba2Config, MambaSpec

NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "pre_ff_layernorm"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Mamba2Config):
    architecture: ClassVar[str] = "BambaForCausalLM"
    model_type: ClassVar[str] = "bamba"
    final_norm_name: ClassVar[str] = "final_layernorm"
    rope_keys: ClassVar[tuple[str, ...]] = ("partial_rotary_factor",)
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = dict.fromkeys(
        ("attn_rotary_emb", "mamba_chunk_size", "num_logits_to_keep", "z_loss_coefficient"), ()
    )

    attn_layer_indices: tuple[int, ...] | None = None
    """Layers with attention; None: there are none."""
    mamba_proj_bias: bool
    """Of Mamba's matrices at both ends."""
    attention_bias: bool
    """On all four projections."""
    mlp_bias: bool

    @property
    def mamba_options(self) -> MambaOptions:
        return MambaOptions(in_bias=self.mamba_proj_bias, out_bias=self.mamba_proj_bias)

    def layers(self) -> tuple[LayerSpec, ...]:
        full = self.attn_layer_indices or ()
        kinds = ("block" if n in full else "mamba" for n in range(self.num_hidden_layers))
        return tuple(map(LayerSpec, kinds))

    def block_spec(self, kind: str) -> BlockSpec:
        bias = self.attention_bias
        attention = AttentionSpec(qkv_bias=bias, out_bias=bias)
        mlp = DenseSpec(module="feed_forward", bias=self.mlp_bias)
        return BlockSpec(attention if kind == "block" else MambaSpec(), mlp, norms=NORMS)


Model, names = SpecDecoder, spec_names
