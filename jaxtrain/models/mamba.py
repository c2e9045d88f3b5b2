"""Shared parts of families with Mamba-2 layers: attributes, tensor names, limits of dt."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Self

from jaxtrain.errors import UserError
from jaxtrain.huggingface.files import describe
from jaxtrain.huggingface.ops import ParameterEntry, PermutedRows, StackedOps, Transpose
from jaxtrain.layers.linear import LayerInit
from jaxtrain.layers.mamba2 import USUAL, Mamba2, MambaOptions, MambaSizes
from jaxtrain.models.decoder import DecoderOptions
from jaxtrain.models.decoder_config import DecoderConfig
from jaxtrain.models.naming import layer_entry, linear_entries


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mamba2Config(DecoderConfig):
    """A DecoderConfig with Mamba-2 layers (Bamba, Granite 4, Falcon-H1)."""

    activations: ClassVar[Collection[str]] = ("silu", "swish")
    """That of the convolution, too."""

    mamba_n_heads: int
    mamba_d_head: int
    mamba_n_groups: int
    mamba_d_state: int
    mamba_d_conv: int
    mamba_expand: int
    mamba_conv_bias: bool
    time_step_limit: tuple[float, ...]

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        raw = dict(raw)
        if raw.get("mamba_d_head") == "auto":
            del raw["mamba_d_head"]
        if raw.get("time_step_limit") is not None:
            raw["time_step_limit"] = read_dt_limit(raw["time_step_limit"])
        return super().from_hf(raw)

    def check(self) -> None:
        self.sizes.check()
        super().check()

    @property
    def sizes(self) -> MambaSizes:
        """Sizes of the Mamba-2 layers."""
        low, high = self.time_step_limit
        return MambaSizes(
            self.mamba_n_heads,
            self.mamba_d_head,
            self.mamba_n_groups,
            self.mamba_d_state,
            self.mamba_d_conv,
            self.mamba_conv_bias,
            (low, high),
        )

    @property
    def mamba_options(self) -> MambaOptions:
        """Choices of the Mamba-2 layers."""
        return USUAL


class MambaSpec:
    """Mamba-2 of the config's sizes; path: what the block calls it."""

    def __init__(self, path: str = "attention"):
        self.path = path

    def build(self, config: Mamba2Config, options: DecoderOptions, init: LayerInit) -> Mamba2:
        choices = {"norm_eps": config.rms_norm_eps, "options": config.mamba_options}
        return Mamba2(config.hidden_size, config.sizes, init=init, **choices)

    def names(self, config: Mamba2Config, kind: str, layers: Sequence[int]) -> list[ParameterEntry]:
        return mamba_names(config.sizes, kind, layers, self.path, "mamba", config.mamba_options)


def mamba_names(
    sizes: MambaSizes,
    kind: str,
    layers: Sequence[int],
    path: str,
    module: str,
    options: MambaOptions = USUAL,
) -> list[ParameterEntry]:
    """The tensors under `model.layers.<n>.<module>`; path: what the block calls the layer."""
    N, P, G, S = sizes[:4]
    R, inner = N // G, N * P
    mixed, columns = [], []
    for group in range(G):
        behind = [(inner + S * group, S), (inner + S * (G + group), S)]
        heads = (group * R * P, R * P)
        mixed += [heads, *behind]
        # Before them stands z, behind them dt.
        columns += [heads, *((inner + start, size) for start, size in (heads, *behind))]
        columns.append((2 * (inner + G * S) + group * R, R))
    conv_rows, all_rows = inner + 2 * G * S, 2 * (inner + G * S) + N

    def rows(leaf: str, runs: Sequence[tuple[int, int]], total: int) -> list[PermutedRows]:
        names = (f"model.layers.{layer}.{module}.{leaf}" for layer in layers)
        return [PermutedRows(name, 0, tuple(runs), total) for name in names]

    into = [Transpose(op) for op in rows("in_proj.weight", columns, all_rows)]
    conv = rows("conv1d.weight", mixed, conv_rows)
    entries = [
        ParameterEntry(f"stack.{kind}.{path}.in_proj.kernel", StackedOps(tuple(into))),
        ParameterEntry(f"stack.{kind}.{path}.conv", StackedOps(tuple(conv))),
        *linear_entries(
            kind, layers, f"{path}.out_proj", f"{module}.out_proj", bias=options.out_bias
        ),
    ]
    if options.norm:
        entries.append(layer_entry(kind, layers, f"{path}.norm.scale", f"{module}.norm.weight"))
    if options.in_bias:
        bias = rows("in_proj.bias", columns, all_rows)
        entries.append(ParameterEntry(f"stack.{kind}.{path}.in_proj.bias", StackedOps(tuple(bias))))
    if sizes.conv_bias:
        bias = rows("conv1d.bias", mixed, conv_rows)
        entries.append(ParameterEntry(f"stack.{kind}.{path}.conv_bias", StackedOps(tuple(bias))))
    for leaf in ("A_log", "D", "dt_bias"):
        entries.append(layer_entry(kind, layers, f"{path}.{leaf}", f"{module}.{leaf}"))
    return entries


def read_dt_limit(value: Any) -> list[float]:
    """`time_step_limit` of a config.json, in which transformers may write infinity as an object;
    UserError for another thing than two numbers in order."""
    ends = value if isinstance(value, list) else []
    ends = [end.get("__float__") if isinstance(end, Mapping) else end for end in ends]
    ends = [float(end) for end in ends if type(end) in (int, float) or end == "Infinity"]
    if len(ends) != 2 or len(value) != 2 or not 0 <= ends[0] < ends[1]:
        raise UserError(
            f"config.json: time_step_limit is {describe(value)}; it must be a list of the least and"
            " the largest step, such as [0.0, Infinity]"
        )
    return ends
