"""Shared parts of the hybrid Qwen families: linear attention (layers.gated_delta) with gated full
attention in every fourth layer, their config.json, their tensor names.

The heads that predict further tokens (`mtp.`) are carried along unless they are trained.
"""

import dataclasses
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Self

from jaxtrain.errors import UserError
from jaxtrain.huggingface.config import read_fields
from jaxtrain.huggingface.ops import ParameterEntry, PermutedRows, StackedOps, Transpose
from jaxtrain.layers.gated_delta import DeltaSizes, GatedDelta
from jaxtrain.layers.linear import LayerInit
from jaxtrain.layers.mixer import LayerSpec
from jaxtrain.layers.norm import RMSNorm, ZeroCenteredRMSNorm
from jaxtrain.models.blocks import AttentionSpec, BlockSpec, MLPSpec
from jaxtrain.models.decoder import DecoderOptions
from jaxtrain.models.mtp_form import QWEN, MTPForm, read_count
from jaxtrain.models.multimodal import TextConfig
from jaxtrain.models.naming import layer_entry, linear_entries
from jaxtrain.models.windows import name_layers

LINEAR, FULL = "linear_attention", "full_attention"


class DeltaSpec:
    """Linear attention of the config's sizes, whose inputs are one tensor each (Qwen3.5)."""

    def build(self, config: "HybridConfig", options: DecoderOptions, init: LayerInit) -> GatedDelta:
        sizes = read_sizes(config)
        return GatedDelta(config.hidden_size, sizes, norm_eps=config.rms_norm_eps, init=init)

    def names(
        self, config: "HybridConfig", kind: str, layers: Sequence[int]
    ) -> list[ParameterEntry]:
        H, K, V = (
            config.linear_num_key_heads,
            config.linear_key_head_dim,
            config.linear_value_head_dim,
        )
        total = 2 * H * K + config.linear_num_value_heads * V
        module = "linear_attn"
        conv = StackedOps(
            tuple(
                PermutedRows(
                    f"model.layers.{layer}.{module}.conv1d.weight", 0, group_rows(config), total
                )
                for layer in layers
            )
        )
        return [
            ParameterEntry(f"stack.{kind}.attention.conv", conv),
            layer_entry(kind, layers, "attention.A_log", f"{module}.A_log"),
            layer_entry(kind, layers, "attention.dt_bias", f"{module}.dt_bias"),
            layer_entry(kind, layers, "attention.norm.scale", f"{module}.norm.weight"),
            *linear_entries(kind, layers, "attention.out", f"{module}.out_proj"),
            *self.projection_names(config, kind, layers),
        ]

    def projection_names(
        self, config: "HybridConfig", kind: str, layers: Sequence[int]
    ) -> list[ParameterEntry]:
        """List the inputs of the convolution and the gates."""
        runs = group_rows(config)
        total = sum(size for _, size in runs)
        qkv = StackedOps(
            tuple(
                Transpose(
                    PermutedRows(
                        f"model.layers.{layer}.linear_attn.in_proj_qkv.weight", 0, runs, total
                    )
                )
                for layer in layers
            )
        )
        entries = [ParameterEntry(f"stack.{kind}.attention.qkv.kernel", qkv)]
        for name in ("z", "b", "a"):
            module = f"linear_attn.in_proj_{name}"
            entries += linear_entries(kind, layers, f"attention.{name}", module)
        return entries


class JointDeltaSpec(DeltaSpec):
    """Linear attention whose inputs are two tensors, in which each key head has its rows of all
    (Qwen3-Next)."""

    def projection_names(
        self, config: "HybridConfig", kind: str, layers: Sequence[int]
    ) -> list[ParameterEntry]:
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
            names = [
                f"model.layers.{layer}.linear_attn.in_proj_{tensor}.weight" for layer in layers
            ]
            op = StackedOps(
                tuple(Transpose(PermutedRows(name, 0, runs, H * step)) for name in names)
            )
            entries.append(ParameterEntry(f"stack.{kind}.attention.{name}.kernel", op))
        return entries


@dataclasses.dataclass(frozen=True, kw_only=True)
class HybridConfig(TextConfig):
    """A TextConfig with layers of linear attention."""

    norm: ClassVar[type[RMSNorm]] = ZeroCenteredRMSNorm
    activations: ClassVar[Collection[str]] = ("silu", "swish")
    """That of the convolution, too."""
    linear_spec: ClassVar[DeltaSpec] = DeltaSpec()
    rope_keys: ClassVar[tuple[str, ...]] = (
        *("partial_rotary_factor", "mrope_section", "mrope_interleaved"),
    )
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "attn_output_gate": (True,),
        "mamba_ssm_dtype": ("float32",),
        "mtp_num_hidden_layers": (),
        "mtp_use_dedicated_embeddings": (False,),
        "output_gate_type": ("swish",),
        "full_attention_interval": (),
        "mlp_only_layers": ([],),
    }

    layer_types: tuple[str, ...] | None = None
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int

    @property
    def carries(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return (QWEN.root,) if self.mtp is None else ()

    @property
    def goes_stale(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return (QWEN.root,) if self.mtp is None else ()

    @property
    def mtp_form(self) -> MTPForm:
        return QWEN

    @property
    def num_predicted(self) -> int | None:
        counts = dict(self.fixed_attributes) | dict(self.unread_attributes)
        return read_count(counts, QWEN.count_key, "num_nextn_predict_layers")

    def inner_config(self, tensors: Collection[str]) -> Self:
        return dataclasses.replace(
            self, num_hidden_layers=1, layer_types=(FULL,), vision=None, prefix="model."
        )

    def count_heads(self) -> dict[str, Any]:
        if self.num_predicted or QWEN.count_key not in self.fixed:
            return {}
        stated = {**dict(self.fixed_attributes), QWEN.count_key: "1"}
        return {"fixed_attributes": tuple(sorted(stated.items()))}

    @classmethod
    def read_text(cls, text: dict[str, Any]) -> dict[str, Any]:
        name_layers(text, ("full_attention_interval",), 4, (LINEAR, FULL))
        values = read_fields(cls, text)
        stated = text.get("rope_parameters") or text.get("rope_scaling") or {}
        if "partial_rotary_factor" not in stated:
            share = text.get("partial_rotary_factor", 0.25)
            values["rope"] = tuple(
                sorted({**dict(values["rope"]), "partial_rotary_factor": share}.items())
            )
        return values

    def check(self) -> None:
        check_linear_layers(self)
        super().check()

    def layers(self) -> tuple[LayerSpec, ...]:
        return tuple(LayerSpec(self.kind(layer)) for layer in range(self.num_hidden_layers))

    def kind(self, layer: int) -> str:
        """Return the name under which a layer is stored."""
        assert self.layer_types is not None
        return "linear" if self.layer_types[layer] == LINEAR else "block"

    @property
    @abstractmethod
    def branch_spec(self) -> MLPSpec:
        """Declaration of the MLP or of the experts."""

    def block_spec(self, kind: str) -> BlockSpec:
        attention = AttentionSpec(qk_norm="head", output_gate="joint")
        linear = kind.endswith("linear")
        return BlockSpec(self.linear_spec if linear else attention, self.branch_spec)


def check_linear_layers(config: Any) -> None:
    """Raise UserError if the sizes of linear attention do not fit together, or unless layer_types
    names each layer."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    if keys < 1 or values < 1 or values % keys:
        raise UserError(
            f"config.json: linear_num_value_heads={values} must be a multiple of"
            f" linear_num_key_heads={keys}"
        )
    for name in ("linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim"):
        if getattr(config, name) < 1:
            raise UserError(f"config.json: {name}={getattr(config, name)} must be at least 1")
    types = config.layer_types or ()
    if len(types) != config.num_hidden_layers or not set(types) <= {LINEAR, FULL}:
        raise UserError(
            f"config.json: layer_types must name {config.num_hidden_layers} layers"
            f" (num_hidden_layers), each {LINEAR} or {FULL}"
        )


def read_sizes(config: Any) -> DeltaSizes:
    """Return the sizes of linear attention."""
    return DeltaSizes(
        config.linear_num_key_heads,
        config.linear_num_value_heads,
        config.linear_key_head_dim,
        config.linear_value_head_dim,
        config.linear_conv_kernel_dim,
    )


def group_rows(config: HybridConfig) -> tuple[tuple[int, int], ...]:
    """Runs of the rows q | k | v of a tensor in the order of `GatedDelta.qkv`: by key head."""
    H, K = config.linear_num_key_heads, config.linear_key_head_dim
    width = config.linear_num_value_heads // H * config.linear_value_head_dim
    runs = []
    for head in range(H):
        runs += [(head * K, K), (H * K + head * K, K), (2 * H * K + head * width, width)]
    return tuple(runs)
