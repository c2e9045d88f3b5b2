"""Shared parts of families with Mamba-2 layers: sizes, the layer, tensor names, limits of dt."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxtrain.errors import UserError
from jaxtrain.huggingface.files import describe
from jaxtrain.huggingface.ops import ParameterEntry, PermutedRows, StackedOps, Transpose
from jaxtrain.layers.mamba2 import Mamba2
from jaxtrain.models.naming import layer_entry, linear_entries


class MambaSizes(NamedTuple):
    """Sizes of a Mamba-2 layer, as `layers.mamba2.Mamba2` takes them."""

    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int
    taps: int
    conv_bias: bool
    dt_limit: tuple[float, float]

    def check(self) -> None:
        """UserError where the heads do not divide into groups."""
        if self.num_heads % self.num_groups:
            raise UserError(
                f"config.json: {self.num_heads} Mamba heads must be a multiple of the"
                f" {self.num_groups} groups"
            )


def make_mamba(
    num_features: int, sizes: MambaSizes, norm_eps: float, common: Mapping[str, Any]
) -> Mamba2:
    """The layer; common: the keyword arguments of layers with weights."""
    heads, head_dim, groups, state_dim, taps, conv_bias, dt_limit = sizes
    return Mamba2(
        num_features,
        heads,
        head_dim,
        groups,
        state_dim,
        taps=taps,
        conv_bias=conv_bias,
        dt_limit=dt_limit,
        norm_eps=norm_eps,
        **common,
    )


def mamba_names(
    sizes: MambaSizes, kind: str, layers: Sequence[int], path: str, module: str
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
        layer_entry(kind, layers, f"{path}.norm.scale", f"{module}.norm.weight"),
        *linear_entries(kind, layers, f"{path}.out_proj", f"{module}.out_proj"),
    ]
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
