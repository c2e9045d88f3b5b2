"""MiMo-V2-Flash (Xiaomi 2026): DeepSeek-V3's experts behind attention whose values have fewer dims
than keys, in most layers with a window, sinks and twice the heads of keys.

The first of the heads that predict further tokens can be trained; all others are carried along."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, Self

from jaxtrain.errors import UserError
from jaxtrain.layers.mixer import LayerSpec
from jaxtrain.models.blocks import AttentionSpec, BlockSpec, SpecDecoder, spec_names
from jaxtrain.models.experts import GroupedExpertsConfig, list_experts
from jaxtrain.models.mtp_form import MIMO, MTPForm
from jaxtrain.models.windows import FULL, SLIDING, windowed_layers

LISTS = {
    "hybrid_layer_pattern": ("layer_types", (FULL, SLIDING)),
    "moe_layer_freq": ("mlp_layer_types", ("dense", "sparse")),
}
"""{list of 0 and 1 in published folders: (list of transformers, its entries)}."""
SAME = {
    "swa_num_attention_heads": "num_attention_heads",
    "swa_head_dim": "head_dim",
    "swa_v_head_dim": "v_head_dim",
}
"""Attributes of layers with a window in published folders, and what they must equal."""
GLOBAL = "full_"
"""Beginning of the kinds of layers without a window."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(GroupedExpertsConfig):
    architecture: ClassVar[str] = "MiMoV2FlashForCausalLM"
    model_type: ClassVar[str] = "mimo_v2_flash"
    newer: ClassVar[bool] = True
    rope_by_kind: ClassVar[bool] = True
    rope_keys: ClassVar[tuple[str, ...]] = ("partial_rotary_factor",)
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **GroupedExpertsConfig.fixed,
        **dict.fromkeys((*LISTS, *SAME, "swa_num_key_value_heads"), ()),
        **dict.fromkeys(("layernorm_epsilon", "swa_rope_theta"), ()),
        "sliding_window_size": (),
        "add_swa_attention_sink_bias": (True,),
        "add_full_attention_sink_bias": (False,),
        "attention_projection_layout": ("split",),
    }

    v_head_dim: int
    attention_value_scale: float | None = None
    """Factor on values; None: 1."""
    attention_bias: bool = False
    """On queries, keys and values."""
    sliding_window: int
    layer_types: tuple[str, ...]
    mlp_layer_types: tuple[str, ...]

    @property
    def carries(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return ("model.mtp.",) if self.mtp is None else self.mtp.others

    @property
    def mtp_form(self) -> MTPForm:
        return MIMO

    @property
    def num_predicted(self) -> int | None:
        """No key states the number of heads."""
        return None

    def count_heads(self) -> dict[str, Any]:
        return {}

    def inner_config(self, tensors: Collection[str]) -> Self:
        """The head's block is a layer with a window and a dense MLP."""
        return dataclasses.replace(
            self, num_hidden_layers=1, layer_types=(SLIDING,), mlp_layer_types=("dense",)
        )

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        return super().from_hf(read_published(raw))

    def to_hf(self) -> dict[str, Any]:
        raw = super().to_hf()
        del raw["first_k_dense_replace"]
        return raw

    def check(self) -> None:
        super().check()
        if self.v_head_dim > self.head_size:
            raise UserError(
                f"config.json: v_head_dim={self.v_head_dim} must be at most"
                f" head_dim={self.head_size}: values are stored beside keys"
            )
        if self.num_attention_heads % (2 * self.num_key_value_heads):
            raise UserError(
                f"config.json: num_attention_heads={self.num_attention_heads} must be a multiple of"
                f" {2 * self.num_key_value_heads}, the heads of keys in layers with a window (twice"
                " num_key_value_heads)"
            )

    def layers(self) -> tuple[LayerSpec, ...]:
        kinds = (SLIDING, FULL)
        specs = windowed_layers(
            self.num_hidden_layers, self.layer_types, self.sliding_window, kinds
        )
        specs = list_experts(specs, self.mlp_layer_types)
        return tuple(
            dataclasses.replace(spec, kind=GLOBAL + spec.kind) if spec.window is None else spec
            for spec in specs
        )

    def block_spec(self, kind: str) -> BlockSpec:
        slides, scale = not kind.startswith(GLOBAL), self.attention_value_scale
        attention = AttentionSpec(
            kv_heads=self.num_key_value_heads * (2 if slides else 1),
            qkv_bias=self.attention_bias,
            value_dim=self.v_head_dim,
            value_scale=1.0 if scale is None else scale,
            sinks=slides,
            sinks_name="attention_sink_bias",
        )
        return BlockSpec(attention, self.mlp_spec(kind))


def read_published(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes with those of Xiaomi's folders by transformers' names, where it has
    them; UserError for values that are not computed here."""
    raw = dict(raw)
    for key, (name, entries) in LISTS.items():
        numbers = raw.get(key)
        if numbers is None:
            continue
        if not isinstance(numbers, list) or not all(
            type(n) is int and n in (0, 1) for n in numbers
        ):
            raise UserError(f"config.json: {key} must be a list of 0 and 1, one for each layer")
        listed = [entries[number] for number in numbers]
        if raw.setdefault(name, listed) not in (None, listed):
            raise UserError(f"config.json: {key} and {name} differ; remove one")
        raw[name] = listed
    expected, heads = {key: raw.get(name) for key, name in SAME.items()}, "num_key_value_heads"
    if type(raw.get(heads)) is int:
        expected[f"swa_{heads}"] = 2 * raw[heads]
    for key, value in expected.items():
        if raw.get(key) not in (None, value):
            raise UserError(f"config.json: {key}={raw[key]!r} is not supported; only {value} is")
    if raw.get("layernorm_epsilon") is not None:
        raw.setdefault("rms_norm_eps", raw["layernorm_epsilon"])
    # As transformers reads it: a query sees so many tokens before itself.
    before = raw.get("sliding_window_size")
    if before is not None:
        if type(before) is not int:
            raise UserError(f"config.json: sliding_window_size={before!r} must be an integer")
        raw["sliding_window"] = before + 1
    theta, share = raw.pop("rope_theta", None), raw.pop("partial_rotary_factor", None)
    if raw.get("rope_parameters") is None and (theta is not None or share is not None):
        bases = {FULL: theta, SLIDING: raw.get("swa_rope_theta")}
        defaults = {FULL: 5e6, SLIDING: 1e4}
        raw["rope_parameters"] = {
            kind: {
                "rope_type": "default",
                "rope_theta": defaults[kind] if base is None else base,
                "partial_rotary_factor": 0.334 if share is None else share,
            }
            for kind, base in bases.items()
        }
    return raw


Model, names = SpecDecoder, spec_names
