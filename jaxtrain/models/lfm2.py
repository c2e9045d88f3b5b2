"""LFM2 dense (Liquid AI 2025, arXiv:2511.23404): short convolutions, and some attention between
them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

from jaxtrain.errors import UserError
from jaxtrain.huggingface.ops import ParameterEntry
from jaxtrain.layers.linear import LayerInit
from jaxtrain.layers.mixer import LayerSpec
from jaxtrain.layers.short_conv import ShortConv
from jaxtrain.models.blocks import (
    AttentionSpec,
    BlockSpec,
    DenseSpec,
    MLPSpec,
    SpecDecoder,
    spec_names,
)
from jaxtrain.models.decoder import DecoderOptions
from jaxtrain.models.decoder_config import DecoderConfig
from jaxtrain.models.naming import NUMBERED_PARTS, joint_names, layer_entry, linear_entries
from jaxtrain.models.windows import FULL

NORMS = {"attention_norm": "operator_norm", "mlp_norm": "ffn_norm"}
MODULE = "feed_forward"
"""Name of the MLP."""
OLD_TIE = {"tie_embedding": "tie_word_embeddings"}


class ConvSpec:
    """A short convolution."""

    def build(self, config: "ConvConfig", options: DecoderOptions, init: LayerInit) -> ShortConv:
        return ShortConv(config.hidden_size, taps=config.conv_L_cache, init=init)

    def names(self, config: "ConvConfig", kind: str, layers: Sequence[int]) -> list[ParameterEntry]:
        parts = {f"attention.{part}": config.hidden_size for part in ("gate_in", "gate_out", "x")}
        return [
            *joint_names(kind, layers, "conv.in_proj", parts),
            layer_entry(kind, layers, "attention.conv", "conv.conv.weight"),
            *linear_entries(kind, layers, "attention.out", "conv.out_proj"),
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvConfig(DecoderConfig):
    """A DecoderConfig with layers of short convolutions."""

    final_norm_name: ClassVar[str] = "embedding_norm"
    renamed: ClassVar[Mapping[str, str]] = {"rms_norm_eps": "norm_eps"}
    old_keys: ClassVar[Mapping[str, str]] = {}
    """{name in the maker's files, which takes precedence: attribute}."""
    kinds: ClassVar[Mapping[str, str]] = {"conv": "conv", FULL: "block"}
    """Entries of `layer_types`, and under which name such a layer is stored here."""

    hidden_act: str = "silu"
    """Activation of the family, whose files have no such attribute."""
    layer_types: tuple[str, ...]
    """Key of `kinds` for each layer."""
    conv_L_cache: int
    """Tokens that a convolution reads."""

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        raw = dict(raw)
        for key, name in cls.old_keys.items():
            value = raw.pop(key, None)
            if value is not None:
                raw[name] = value
        return super().from_hf(raw)

    def to_hf(self) -> dict[str, Any]:
        raw = super().to_hf()
        del raw["hidden_act"]
        return raw

    def layers(self) -> tuple[LayerSpec, ...]:
        return tuple(LayerSpec(self.kinds[name]) for name in self.layer_types)

    def check(self) -> None:
        types, kinds = self.layer_types, self.kinds
        if len(types) != self.num_hidden_layers or not set(types) <= {*kinds}:
            raise UserError(
                f"config.json: layer_types must name {self.num_hidden_layers} layers"
                f" (num_hidden_layers), each one of {', '.join(kinds)}"
            )
        if self.conv_L_cache < 2:
            raise UserError(f"config.json: conv_L_cache={self.conv_L_cache} must be at least 2")
        super().check()

    @property
    def block_norms(self) -> dict[str, str]:
        """The norms of a block and what they are called there."""
        return NORMS

    @property
    def attention_spec(self) -> AttentionSpec:
        """Declaration of attention."""
        norms = ("q_layernorm", "k_layernorm")
        return AttentionSpec(qk_norm="head", qk_norm_names=norms, out_name="out_proj")

    def mlp_spec(self, kind: str) -> MLPSpec:
        """Return the declaration of the MLP of a kind of layers."""
        return DenseSpec(module=MODULE, parts=NUMBERED_PARTS)

    def block_spec(self, kind: str) -> BlockSpec:
        mixer = self.attention_spec if kind.startswith("block") else ConvSpec()
        return BlockSpec(mixer, self.mlp_spec(kind), norms=self.block_norms)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(ConvConfig):
    architecture: ClassVar[str] = "Lfm2ForCausalLM"
    model_type: ClassVar[str] = "lfm2"
    old_keys: ClassVar[Mapping[str, str]] = {**OLD_TIE, "block_ff_dim": "intermediate_size"}
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **dict.fromkeys(("block_dim", "block_mlp_init_scale", "block_out_init_scale"), ()),
        **dict.fromkeys(("block_norm_eps", "block_use_xavier_init", "conv_dim"), ()),
        **dict.fromkeys(("conv_dim_out", "conv_use_xavier_init", "num_heads"), ()),
        "block_use_swiglu": (True,),
    }

    full_attn_idxs: tuple[int, ...] | None = None
    """Layers with attention, from which transformers derives layer_types where it is absent."""
    block_auto_adjust_ff_dim: bool = True
    """True if F is computed from intermediate_size by the next two; else intermediate_size is F."""
    block_ffn_dim_multiplier: float | None = 1.0
    block_multiple_of: int = 256

    def check(self) -> None:
        if self.block_multiple_of < 1 or self.mlp_width < 1:
            raise UserError(
                f"config.json: intermediate_size={self.intermediate_size},"
                f" block_ffn_dim_multiplier={self.block_ffn_dim_multiplier} and"
                f" block_multiple_of={self.block_multiple_of} make no width of an MLP"
            )
        super().check()

    @property
    def mlp_width(self) -> int:
        """F of the MLP."""
        width = self.intermediate_size
        if not self.block_auto_adjust_ff_dim:
            return width
        width = int(2 * width / 3)
        if self.block_ffn_dim_multiplier is None:
            return width
        width, step = int(self.block_ffn_dim_multiplier * width), self.block_multiple_of
        return (width + step - 1) // step * step

    def mlp_spec(self, kind: str) -> DenseSpec:
        return dataclasses.replace(super().mlp_spec(kind), hidden=self.mlp_width)


Model, names = SpecDecoder, spec_names
