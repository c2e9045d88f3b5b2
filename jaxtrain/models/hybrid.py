"""What the hybrid families of Qwen share: layers of linear attention (layers.gated_delta), every
fourth one of gated full attention; their config.json in its two forms; their tensor names.

Folders of the Hub are multimodal: what concerns text stands in `text_config`, the rest around it.
The vision tower (`model.visual.`) and the heads that predict further tokens (`mtp.`) are no part of
the model here; every export takes them along byte by byte.
"""

import dataclasses
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Self

from flax import nnx

from jaxtrain.errors import UserError
from jaxtrain.hf.config import read_fields
from jaxtrain.hf.config_checks import is_number
from jaxtrain.hf.files import describe, spell
from jaxtrain.hf.ops import Entry, Rows, Stack, Transpose
from jaxtrain.layers.gated_delta import GatedDelta
from jaxtrain.layers.mixer import LayerSpec
from jaxtrain.layers.norm import RMSNorm, ZeroCentredRMSNorm
from jaxtrain.models.blocks import MakeMLP, attention_block, block_of
from jaxtrain.models.decoder import DecoderConfig, Options
from jaxtrain.models.naming import layer_entry, linear_entries, norm_names

LINEAR, FULL = "linear_attention", "full_attention"
MULTIMODAL = "model.language_model."
SAID: dict[str, tuple[Any, ...]] = {
    "attn_output_gate": (True,),
    "mamba_ssm_dtype": ("float32",),
    "mtp_num_hidden_layers": (),
    "mtp_use_dedicated_embeddings": (False,),
    "output_gate_type": ("swish",),
    "full_attention_interval": (),
    "mlp_only_layers": ([],),
}
"""Attributes that transformers' config classes do not know, and the values that are computed here;
none: any number."""
MEDIA = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
NOT_AROUND = {"text_config", "dtype", "torch_dtype", "transformers_version"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class HybridConfig(DecoderConfig):
    """A DecoderConfig with layers of linear attention."""

    norm: ClassVar[type[RMSNorm]] = ZeroCentredRMSNorm
    rope_keys: ClassVar[tuple[str, ...]] = (
        *("partial_rotary_factor", "mrope_section", "mrope_interleaved"),
    )
    """The last two set rows, columns and time of images apart, which are one number for text."""
    carries: ClassVar[tuple[str, ...]] = ("model.visual.", "mtp.")
    goes_stale: ClassVar[tuple[str, ...]] = ("mtp.",)
    text_type: ClassVar[str]
    """model_type of the text alone, by which transformers reads its attributes."""

    layer_types: tuple[str, ...] | None = None
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    around: str | None = None
    """JSON of what stands around `text_config`; None: there is no such level."""
    said: tuple[tuple[str, str], ...] = ()
    """Attributes of SAID that were there, as (key, JSON)."""
    prefix: str = "model."
    """Of the tensors of text."""

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        """From either form; UserError for anything that would be ignored."""
        around, text = split_levels(raw, cls)
        own = {field.name for field in dataclasses.fields(cls)}
        said = {key: text.pop(key) for key in SAID if key in text and key not in own}
        check_said(said)
        if text.get("layer_types") is None and type(text.get("num_hidden_layers")) is int:
            every = said.get("full_attention_interval", 4)
            text["layer_types"] = [
                LINEAR if (layer + 1) % every else FULL
                for layer in range(min(text["num_hidden_layers"], 2**12))
            ]
        values = read_text(cls, text)
        values["said"] = tuple((key, json.dumps(value)) for key, value in sorted(said.items()))
        if around is not None:
            values["around"] = json.dumps(around, sort_keys=True)
            values["prefix"] = MULTIMODAL
        config = cls(**values)
        config.check()
        return config

    def to_hf(self) -> dict[str, Any]:
        raw = super().to_hf()
        raw |= {key: json.loads(value) for key, value in self.said}
        if self.around is None:
            return {**raw, "model_type": self.text_type}
        del raw["architectures"]
        text = {**raw, "model_type": self.text_type}
        outer = {**json.loads(self.around), "tie_word_embeddings": self.tie_word_embeddings}
        return {**outer, "model_type": self.model_type, "text_config": text}

    def fit(self, tensors: Collection[str]) -> Self:
        """The prefix stands in the folder, not in its config: transformers writes a flat config
        beside long names."""
        for prefix in (MULTIMODAL, "model."):
            if f"{prefix}embed_tokens.weight" in tensors:
                return dataclasses.replace(self, prefix=prefix)
        return self

    def check(self) -> None:
        keys, values = self.linear_num_key_heads, self.linear_num_value_heads
        if keys < 1 or values < 1 or values % keys:
            raise UserError(
                f"config.json: linear_num_value_heads={values} must be a multiple of"
                f" linear_num_key_heads={keys}"
            )
        for name in ("linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim"):
            if getattr(self, name) < 1:
                raise UserError(f"config.json: {name}={getattr(self, name)} must be at least 1")
        types = self.layer_types or ()
        if len(types) != self.num_hidden_layers or not set(types) <= {LINEAR, FULL}:
            raise UserError(
                f"config.json: layer_types must name {self.num_hidden_layers} layers"
                f" (num_hidden_layers), each {LINEAR} or {FULL}"
            )
        if self.score is not None and self.around is not None:
            raise UserError(
                f"{self.architecture}: a model that scores has no place for the vision tower of a"
                " multimodal folder; start from its text alone: transformers.AutoModelForCausalLM"
                ".from_pretrained(FOLDER).save_pretrained(TEXT)"
            )
        super().check()

    def check_drawn(self) -> None:
        if self.around is not None:
            raise UserError(
                f"{self.architecture}: the vision tower of a multimodal config cannot be drawn at"
                f' random here; give what is in text_config alone, with architectures ["'
                f'{self.architecture}"]'
            )

    @property
    def media_tokens(self) -> Mapping[int, str]:
        raw = {} if self.around is None else json.loads(self.around)
        return {raw[key]: key for key in MEDIA if type(raw.get(key)) is int}

    def layers(self) -> tuple[LayerSpec, ...]:
        return tuple(LayerSpec(self.kind(layer)) for layer in range(self.num_hidden_layers))

    def kind(self, layer: int) -> str:
        """Under which name a layer is stored."""
        assert self.layer_types is not None
        return "linear" if self.layer_types[layer] == LINEAR else "block"


def split_levels(
    raw: Mapping[str, Any], cls: type[HybridConfig]
) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """(what stands around the text's attributes, or None where there is one level; these)."""
    if "text_config" not in raw:
        return None, dict(raw)
    text = raw["text_config"]
    around = {key: value for key, value in raw.items() if key not in NOT_AROUND}
    if not isinstance(text, Mapping):
        raise UserError(f"config.json: text_config is {describe(text)}; it is an object")
    if text.get("model_type", cls.text_type) != cls.text_type:
        raise UserError(
            f"config.json: text_config.model_type={spell(text['model_type'])!r}; that of"
            f" {cls.architecture} is {cls.text_type!r}"
        )
    text = dict(text)
    text.pop("architectures", None)
    # transformers goes by the one on top, and leaves its default below when it writes.
    tied = around.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    if text.get("tie_word_embeddings") is True and tied is not True:
        raise UserError(
            f"config.json: tie_word_embeddings is {describe(tied)} on top and true in text_config;"
            " make them the same"
        )
    text["tie_word_embeddings"] = tied
    unknown = around.get("language_model_only")
    if unknown not in (None, False):
        raise UserError(
            f"config.json: language_model_only={describe(unknown)} is not supported; only false"
        )
    return around, text


def check_said(said: Mapping[str, Any]) -> None:
    """UserError where an attribute says something that is not computed here."""
    for key, value in said.items():
        allowed = SAID[key]
        fits = value in allowed if allowed else is_number(value) and value >= 0
        if key == "full_attention_interval":
            fits = type(value) is int and value > 0
        if not fits:
            only = " or ".join(map(json.dumps, allowed)) or "a number"
            raise UserError(
                f"config.json: {key}={describe(value)} is not supported; only {only} is"
            )


def read_text(cls: type[HybridConfig], text: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `cls` from the text's attributes, with the share of rotated dims where
    rope_parameters leaves it out."""
    values = read_fields(cls, text)
    stated = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if "partial_rotary_factor" not in stated:
        share = text.get("partial_rotary_factor", 0.25)
        values["rope"] = tuple(
            sorted({**dict(values["rope"]), "partial_rotary_factor": share}.items())
        )
    return values


def make_mixing_block(
    linear: bool, config: HybridConfig, options: Options, rngs: nnx.Rngs, make_mlp: MakeMLP
) -> nnx.Module:
    """A block of linear or of gated full attention."""
    if not linear:
        return attention_block(
            config, options, rngs, qk_norm="head", output_gate="joint", make_mlp=make_mlp
        )
    common = options.layer_options(config, rngs)
    mixer = GatedDelta(
        config.hidden_size,
        config.linear_num_key_heads,
        config.linear_num_value_heads,
        config.linear_key_head_dim,
        config.linear_value_head_dim,
        taps=config.linear_conv_kernel_dim,
        norm_eps=config.rms_norm_eps,
        **common,
    )
    return block_of(config, common, mixer, make_mlp)


def group_rows(config: HybridConfig) -> tuple[tuple[int, int], ...]:
    """Runs of the rows q | k | v of a tensor in the order of `GatedDelta.qkv`: by key head."""
    H, K = config.linear_num_key_heads, config.linear_key_head_dim
    width = config.linear_num_value_heads // H * config.linear_value_head_dim
    runs = []
    for head in range(H):
        runs += [(head * K, K), (H * K + head * K, K), (2 * H * K + head * width, width)]
    return tuple(runs)


def linear_names(config: HybridConfig, kind: str, layers: Sequence[int]) -> list[Entry]:
    """Linear attention and both norms, all but what goes into the convolution and the gates."""
    H, K, V = config.linear_num_key_heads, config.linear_key_head_dim, config.linear_value_head_dim
    total = 2 * H * K + config.linear_num_value_heads * V
    module = "linear_attn"
    conv = Stack(
        tuple(
            Rows(f"model.layers.{layer}.{module}.conv1d.weight", 0, group_rows(config), total)
            for layer in layers
        )
    )
    return [
        *norm_names(kind, layers),
        Entry(f"stack.{kind}.attention.conv", conv),
        layer_entry(kind, layers, "attention.A_log", f"{module}.A_log"),
        layer_entry(kind, layers, "attention.dt_bias", f"{module}.dt_bias"),
        layer_entry(kind, layers, "attention.norm.scale", f"{module}.norm.weight"),
        *linear_entries(kind, layers, "attention.out", f"{module}.out_proj"),
    ]


def projection_names(config: HybridConfig, kind: str, layers: Sequence[int]) -> list[Entry]:
    """What goes into the convolution and the gates, a tensor each (Qwen3.5)."""
    runs = group_rows(config)
    total = sum(size for _, size in runs)
    qkv = Stack(
        tuple(
            Transpose(Rows(f"model.layers.{layer}.linear_attn.in_proj_qkv.weight", 0, runs, total))
            for layer in layers
        )
    )
    entries = [Entry(f"stack.{kind}.attention.qkv.kernel", qkv)]
    for name in ("z", "b", "a"):
        module = f"linear_attn.in_proj_{name}"
        entries += linear_entries(kind, layers, f"attention.{name}", module)
    return entries


def joint_projection_names(config: HybridConfig, kind: str, layers: Sequence[int]) -> list[Entry]:
    """The same from two tensors, in which each key head has its rows of all (Qwen3-Next)."""
    H, K = config.linear_num_key_heads, config.linear_key_head_dim
    R = config.linear_num_value_heads // H
    width = R * config.linear_value_head_dim
    parts = {
        "qkv": ("qkvz", 0, 2 * K + width),
        "z": ("qkvz", 2 * K + width, width),
        "b": ("ba", 0, R),
        "a": ("ba", R, R),
    }
    steps = {"qkvz": 2 * K + 2 * width, "ba": 2 * R}
    entries = []
    for name, (tensor, start, size) in parts.items():
        step = steps[tensor]
        runs = tuple((head * step + start, size) for head in range(H))
        names = [f"model.layers.{layer}.linear_attn.in_proj_{tensor}.weight" for layer in layers]
        op = Stack(tuple(Transpose(Rows(name, 0, runs, H * step)) for name in names))
        entries.append(Entry(f"stack.{kind}.attention.{name}.kernel", op))
    return entries
