"""PEFT's adapters of experts that one parameter holds (`target_parameters`, its ParamWrapper).

transformers 5 has the matrices of all experts of a layer in two parameters, gate_up_proj and
down_proj, and PEFT 0.21 gives each one pair:

    lora_A.weight [E R, in]     expert after expert, R rows each
    lora_B.weight [out, R E]    rank after rank, E columns each: that of expert e is B[:, e::E]

so that expert e is corrected by s B[:, e::E] A[e R : (e + 1) R]. Wrappers of one module are nested
in the order of its parameters: of two, the pair of the first lies under `base_layer`.

Our gate and up have pairs of their own. Written, they are one of rank 2 R: the factors A below each
other, B zero where the other's is. Read, each has the whole A and its own rows of B.

PEFT takes a parameter for [E, out, in] unless its module has `is_transposed`. Llama 4's are
[E, in, out] and do not say so, so that lora_A is our b and lora_B our a there.
"""

import dataclasses
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxtrain.adapters.spec import ROUTER, Linears
from jaxtrain.huggingface.ops import (
    SplitPiece,
    SplitRows,
    StackedOps,
    TensorOp,
    TensorRef,
    Transpose,
    full_index,
)
from jaxtrain.models.decoder_config import DecoderConfig
from jaxtrain.models.families import family

RUNTIME = (
    (".block_sparse_moe.input_linear.weight", ".block_sparse_moe.experts.gate_up_proj"),
    (".block_sparse_moe.output_linear.weight", ".block_sparse_moe.experts.down_proj"),
)
"""Names of parameters in folders that transformers 5 reads as others."""
SPLIT_RUNTIME = ((".block_sparse_moe.experts.", ".mlp.experts."),)
"""Such names where each expert has its own tensors."""
ONE_OF_MANY = re.compile(r"(.*\.experts)\.\d+\.[^.]+\.weight")


class WrappedExperts(NamedTuple):
    """A matrix of experts [E, in, out] as a part of a parameter in PEFT."""

    parameters: tuple[str, ...]
    """The parameter of each layer."""
    start: int
    """Our first output among those of the parameter; the others follow each `step`."""
    step: int
    total: int
    """Outputs of the parameter."""
    num_experts: int
    alone: bool
    """Whether the base's folder has a tensor for each expert."""
    swapped: bool = False
    """Whether PEFT takes the inputs of the parameter for its outputs."""

    @property
    def target(self) -> str:
        """Name in target_parameters, for all layers."""
        return generic(self.parameters[0])

    def module(self, layer: int, targets: Collection[str]) -> str:
        """Return the module that has the pair if all of `targets` are wrapped."""
        module, _, _ = self.parameters[layer].rpartition(".")
        owner, _, name = self.target.rpartition(".")
        same = [target for target in targets if target.rpartition(".")[0] == owner]
        # Parameters for what goes in come before those for what comes out.
        inner = any(target.endswith(".down_proj") for target in same) and name != "down_proj"
        return module + ".base_layer" * inner


def generic(parameter: str) -> str:
    """Return a parameter's name without its layer."""
    return re.sub(r"^.*?\blayers\.\d+\.", "", parameter)


def find_wrapped(config: DecoderConfig, linears: Linears) -> dict[str, WrappedExperts]:
    """Return all matrices of experts of an architecture by path."""
    entries = {entry.param: entry.op for entry in family(config).names(config)}
    wrapped = {}
    for path, linear in linears.items():
        owner, _, part = path.rpartition(".")
        op = entries[f"{path}.kernel"]
        of_experts = owner.endswith(".experts") and linear.preset != ROUTER
        if not of_experts or not isinstance(op, StackedOps):
            continue
        _, num_experts, _, outputs = linear.shape
        gated = f"{owner}.gate" in linears
        if isinstance(op.ops[0], StackedOps):
            leaves = [innermost(layer) for layer in op.ops]
            modules = [ONE_OF_MANY.fullmatch(leaf.name) for leaf in leaves]
            if not all(modules):
                continue
            joined = gated and part in ("gate", "up")
            name = "gate_up_proj" if joined else f"{part}_proj"
            parameters = tuple(
                _runtime(f"{match[1]}.{name}", SPLIT_RUNTIME) for match in modules if match
            )
            start, total = outputs * (joined and part == "up"), outputs * (1 + joined)
            wrapped[path] = WrappedExperts(parameters, start, 1, total, num_experts, True)
            continue
        leaves = [innermost(layer) for layer in op.ops]
        if all(isinstance(leaf, TensorRef | SplitRows) or hasattr(leaf, "step") for leaf in leaves):
            start, step = getattr(leaves[0], "start", 0), getattr(leaves[0], "step", 1)
            total = outputs if isinstance(leaves[0], TensorRef) else 2 * outputs
            parameters = tuple(_runtime(leaf.name) for leaf in leaves)
            wrapped[path] = WrappedExperts(
                parameters, start, step, total, num_experts, False, config.experts_swapped
            )
    return wrapped


def innermost(op: TensorOp) -> Any:
    """Return the op on the tensor itself; for several layers or experts, that of the first."""
    match op:
        case StackedOps():
            return innermost(op.ops[0])
        case Transpose():
            return innermost(op.op)
    return op


def _runtime(name: str, renames: Sequence[tuple[str, str]] = RUNTIME) -> str:
    for stored_name, runtime_name in renames:
        if stored_name in name:
            return name.replace(stored_name, runtime_name)
    return name


def find_targets(names: Iterable[str], wrapped: Mapping[str, WrappedExperts]) -> set[str]:
    """Return the `WrappedExperts.target`s that PEFT's target_parameters name, matched by suffix as
    in PEFT."""
    return {
        experts.target
        for experts in wrapped.values()
        for name in names
        if any(f".{parameter}".endswith(f".{name}") for parameter in experts.parameters)
    }


class Outputs(NamedTuple):
    """Positions of a matrix's outputs among those of its parameter in PEFT."""

    first: int
    step: int
    total: int

    def __call__(self, index: slice) -> slice:
        """Return where some of the matrix's outputs are."""
        last = self.first + (index.stop - 1) * self.step
        return slice(self.first + index.start * self.step, last + 1, self.step)


@dataclasses.dataclass(frozen=True)
class ExpertsA:
    """Our a [E, in, R], R rows from `start` of each expert's `ranks` rows of a tensor there; or,
    with `outputs`, our b transposed [E, out, R], whose other outputs are written as zeros."""

    name: str
    start: int
    ranks: int
    num_experts: int
    outputs: Outputs | None = None

    def shapes(self, shape):
        columns = shape[1] if self.outputs is None else self.outputs.total
        return {self.name: (self.num_experts * self.ranks, columns)}

    def _rows(self, expert: int, ranks: slice) -> slice:
        first = expert * self.ranks + self.start
        return slice(first + ranks.start, first + ranks.stop)

    def read(self, fetch, index):
        experts, inputs, ranks = index
        columns = inputs if self.outputs is None else self.outputs(inputs)
        parts = [
            fetch(self.name, (self._rows(expert, ranks), columns)).T
            for expert in range(experts.start, experts.stop)
        ]
        return np.stack(parts)

    def write(self, array, host):
        array = host(array)
        shape = self.shapes(array.shape)[self.name]
        for expert, a in enumerate(array):
            rows, part = self._rows(expert, slice(0, a.shape[1])), a.T
            if self.outputs is not None:
                part = np.zeros((a.shape[1], shape[1]), a.dtype)
                part[:, self.outputs(slice(0, a.shape[0]))] = a.T
            yield SplitPiece(self.name, shape, (rows, slice(0, shape[1])), part)


@dataclasses.dataclass(frozen=True)
class ExpertsB:
    """Our b [E, R, out], the chosen outputs of R of the `ranks` of a tensor there, from `start` on;
    what is written is zero at its other outputs. Or, without `outputs`, our a transposed
    [E, R, in]."""

    name: str
    start: int
    ranks: int
    num_experts: int
    outputs: Outputs | None = None

    def shapes(self, shape):
        rows = shape[2] if self.outputs is None else self.outputs.total
        return {self.name: (rows, self.ranks * self.num_experts)}

    def read(self, fetch, index):
        experts, ranks, outputs = index
        chosen = outputs if self.outputs is None else self.outputs(outputs)
        columns = slice(
            (self.start + ranks.start) * self.num_experts,
            (self.start + ranks.stop) * self.num_experts,
        )
        part = fetch(self.name, (chosen, columns))
        part = part.reshape(part.shape[0], ranks.stop - ranks.start, self.num_experts)
        return part.transpose(2, 1, 0)[experts]

    def write(self, array, host):
        array = host(array)
        experts, ranks, outputs = array.shape
        shape = self.shapes(array.shape)[self.name]
        columns = slice(self.start * experts, (self.start + ranks) * experts)
        part = np.zeros((shape[0], ranks * experts), array.dtype)
        chosen = slice(0, outputs) if self.outputs is None else self.outputs(slice(0, outputs))
        part[chosen] = array.transpose(2, 1, 0).reshape(outputs, -1)
        yield SplitPiece(self.name, shape, (full_index(shape)[0], columns), part)
