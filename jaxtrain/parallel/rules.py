"""The one table from logical axes to mesh axes, and what is derived from it.

Parameters carry their logical axes as metadata (`nnx.Param(value, axes=("embed", "heads"))`);
activations are named where they are constrained. Nothing outside this file names a mesh axis but
`feed.py` and the shard_map around attention, which both read this table.
"""

from collections.abc import Sequence

import jax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

RULES: dict[str, tuple[str, ...]] = {
    # parameters
    "layers": (),
    "embed": ("fsdp",),
    "vocab": ("tensor",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "experts": ("expert",),
    "norm": (),
    "rank": (),
    # activations
    "rows": ("data", "fsdp"),
    "length": ("context",),
    "features": (),
    "act_heads": ("tensor",),
    "act_mlp": ("tensor",),
    "act_vocab": ("tensor",),
}


def partition_spec(
    names: Sequence[str | None], shape: Sequence[int], mesh: Mesh | AbstractMesh
) -> PartitionSpec:
    """Mesh axes for an array of `shape` whose dims are called `names`.

    A dim that the mesh axes do not divide stays whole: an odd vocabulary or one row on four
    devices costs memory, never a refusal.
    """
    assert len(names) == len(shape), f"{names} names {len(names)} dims of an array {tuple(shape)}"
    spec: list[tuple[str, ...] | None] = []
    for name, size in zip(names, shape, strict=True):
        axes = RULES[name] if name is not None else ()
        axes = tuple(axis for axis in axes if mesh.shape.get(axis, 1) > 1)
        ways = 1
        for axis in axes:
            ways *= mesh.shape[axis]
        spec.append(axes if axes and size % ways == 0 else None)
    return PartitionSpec(*spec)


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
    """`x` with its dims placed by the table; `x` itself without a mesh or with one device."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, partition_spec(names, x.shape, mesh))


def shardings(state: nnx.State, mesh: Mesh) -> nnx.State:
    """NamedSharding of every variable of an (abstract) state, from its `axes` metadata.

    A variable without axes is replicated. The result has the state's structure, so it serves as
    `out_shardings` of a jitted function that returns that state.
    """

    def place(variable: nnx.Variable) -> nnx.Variable:
        shape = variable.get_value().shape
        names = variable.get_metadata().get("axes") or (None,) * len(shape)
        return variable.replace(NamedSharding(mesh, partition_spec(names, shape, mesh)))

    return jax.tree.map(place, state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
