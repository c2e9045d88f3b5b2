"""Table from logical axes to mesh axes, and functions derived from it.

"length" is a row's tokens inside a layer; "sequence" the same tokens between layers, where norms
and residuals are sharded over the tensor axis, too (Korthikanti et al. 2022, arXiv:2205.05198);
"row_heads" the heads of a layer that needs whole rows, and therefore shards its heads twice. Rows
are sharded over the expert axis as over fsdp, so that non-expert layers do no work twice.

Parameters carry their logical axes as metadata (`nnx.Param(value, axes=("embed", "heads"))`);
activations are named where they are constrained. No other file names a mesh axis; `feed.py` and
every shard_map read this table.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

RULES: dict[str, tuple[str, ...]] = {
    # parameters
    "layers": (),
    "embed": ("fsdp", "context", "expert"),
    "expert_embed": ("fsdp", "context"),  # of experts, which have an axis of their own
    "vocab": ("tensor",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "experts": ("expert",),
    "norm": (),
    "rank": (),
    # activations
    "rows": ("data", "fsdp", "expert"),
    "length": ("context",),
    "sequence": ("context", "tensor"),
    "features": (),
    "act_heads": ("tensor",),
    "row_heads": ("tensor", "context"),
    "act_mlp": ("tensor",),
    "act_vocab": ("tensor",),
}


class Axes(Protocol):
    """Interface of a mesh that the table needs: concrete, abstract, or hypothetical."""

    @property
    def shape(self) -> Any:
        """{axis: number of devices}."""
        ...


def partition_spec(names: Sequence[str | None], shape: Sequence[int], mesh: Axes) -> PartitionSpec:
    """Return the mesh axes for an array of `shape` whose dims have logical `names`; see
    `split_axes`."""
    return PartitionSpec(*(axes or None for axes in split_axes(names, shape, mesh)))


def split_axes(
    names: Sequence[str | None], shape: Sequence[int], mesh: Axes
) -> list[tuple[str, ...]]:
    """Return the mesh axes over which each dim is sharded.

    A dim that its mesh axes do not divide is sharded over the first of them that do, or not at all:
    an odd vocabulary or one row on four devices costs memory, but is never refused.
    """
    assert len(names) == len(shape), f"{names} names {len(names)} dims of an array {tuple(shape)}"
    dims = []
    for name, size in zip(names, shape, strict=True):
        axes = () if name is None else mesh_axes(name, mesh)
        while size % count_ways(axes, mesh):
            axes = axes[:-1]
        dims.append(axes)
    return dims


def fit(sharding: NamedSharding, shape: Sequence[int]) -> NamedSharding:
    """Return the sharding for an array of another shape: a dim that its mesh axes no longer divide
    is sharded over fewer of them, as by `split_axes`."""
    spec = []
    for entry, size in itertools.zip_longest(sharding.spec, shape):
        axes = (entry,) if isinstance(entry, str) else tuple(entry or ())
        while size % count_ways(axes, sharding.mesh):
            axes = axes[:-1]
        spec.append(axes or None)
    return NamedSharding(sharding.mesh, PartitionSpec(*spec), memory_kind=sharding.memory_kind)


def mesh_axes(name: str, mesh: Axes) -> tuple[str, ...]:
    """Return the axes with more than one device over which a logical axis is sharded."""
    return tuple(axis for axis in RULES[name] if mesh.shape.get(axis, 1) > 1)


def count_ways(axes: Sequence[str], mesh: Axes) -> int:
    """Return the number of shards that these mesh axes make."""
    return math.prod(mesh.shape[axis] for axis in axes)


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
    """Constrain the sharding of `x` by the table; return `x` itself without a mesh or with one
    device."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, partition_spec(names, x.shape, mesh))


class StateProgram:
    """A jitted function that takes its own results again, such as a step of sampling.

    A program is compiled anew for arguments whose shardings are written otherwise. jax.jit alone
    would compile one for the state that a loop begins with, which has no mesh's sharding, and one
    for the state that the program returns. Here all results on a mesh of one device have the same.
    """

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        """options: of jax.jit."""
        self._function, self._options = function, options
        self._plain: Any = jax.jit(function, **options)
        self._spread: Any = jax.jit(replicate_vectors(function), **options)
        self._programs: dict[Mesh, Any] = {}
        functools.update_wrapper(self, function)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Run the program of the mesh in use."""
        return self._find_program()(*arguments, **keywords)

    def trace(self, *arguments: Any, **keywords: Any) -> Any:
        """Trace the program of the mesh in use, as a function of jax.jit does."""
        return self._find_program().trace(*arguments, **keywords)

    def _find_program(self) -> Any:
        try:
            mesh = jax.sharding.get_mesh()
        except ValueError:  # within the trace of another program, which decides on shardings
            return self._plain
        if mesh.empty or mesh.size > 1:
            return self._plain if mesh.empty else self._spread
        if mesh not in self._programs:
            sharding = NamedSharding(mesh, PartitionSpec())
            self._programs[mesh] = jax.jit(self._function, out_shardings=sharding, **self._options)
        return self._programs[mesh]

    def count(self) -> int:
        """Return how many programs jax holds of it."""
        programs = (self._plain, self._spread, *self._programs.values())
        return sum(program._cache_size() for program in programs)


def replicate_vectors(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with results of at most one axis copied to all devices of the mesh."""

    def place(x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, PartitionSpec()) if x.ndim <= 1 else x

    @functools.wraps(function)
    def run(*arguments: Any, **keywords: Any) -> Any:
        return jax.tree.map(place, function(*arguments, **keywords))

    return run


def state_program(**options: Any) -> Callable[[Callable[..., Any]], StateProgram]:
    """Return a decorator that makes a StateProgram. options: of jax.jit."""
    return functools.partial(StateProgram, **options)


def gathered(weight: nnx.Variable, dtype: jax.typing.DTypeLike | None = None) -> jax.Array:
    """Return a weight, cast to `dtype`, unsharded along "embed", along which only storage is
    sharded.

    Explicit, because the partitioner may find it cheaper to gather activations instead. The
    gradient goes straight back to the owners of the shards: a reduce-scatter.
    """
    x = weight[...] if dtype is None else weight[...].astype(dtype)
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1 or not mesh_axes("embed", mesh):
        return x
    names = weight.get_metadata()["axes"]
    # A layer that a scan took out of a stack has lost its leading dims, but not their names.
    return _gathered(x, names[len(names) - x.ndim :])


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gathered(x, names):
    return constrain(x, *(None if name == "embed" else name for name in names))


def _gathered_fwd(x, names):
    return _gathered(x, names), None


def _gathered_bwd(names, _, cotangent):
    # In two steps, or the product that makes it takes its operands apart along "embed" as well.
    return (constrain(_gathered(cotangent, names), *names),)


_gathered.defvjp(_gathered_fwd, _gathered_bwd)


def shardings(state: nnx.State, mesh: Mesh) -> nnx.State:
    """Return the NamedSharding of every variable of an (abstract) state, from its `axes` metadata.

    A variable without axes is replicated. The result has the state's structure, so it serves as
    `out_shardings` of a jitted function that returns that state.
    """

    def place(variable: nnx.Variable) -> nnx.Variable:
        shape = variable.get_value().shape
        names = variable.get_metadata().get("axes") or (None,) * len(shape)
        return variable.replace(NamedSharding(mesh, partition_spec(names, shape, mesh)))

    return jax.tree.map(place, state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
