"""Shared parts of families with Mamba-2 layers: tensor names, limits of dt."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxtrain.errors import UserError
from jaxtrain.huggingface.files import describe
from jaxtrain.huggingface.ops import ParameterEntry, PermutedRows, StackedOps, Transpose
from jaxtrain.layers.mamba2 import USUAL, MambaOptions, MambaSizes
from jaxtrain.models.naming import layer_entry, linear_entries


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
