"""Host batches to global device arrays: rows over data, fsdp and expert, tokens over context."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtrain.batch import Batch
from jaxtrain.distributed.sharding import RULES, count_ways, mesh_axes
from jaxtrain.errors import UserError


def row_shards(mesh: Mesh) -> int:
    """Number of ways the rows of a batch are split: the rows axis must be a multiple of it."""
    return count_ways(RULES["rows"], mesh)


def feed(batch: Batch, mesh: Mesh | None = None) -> Batch:
    """Host Batch [A, B, T] to device arrays of the same dtypes (64 bits become 32 unless jax has
    them enabled); `denoms`, numbers or [A], are copied to every device.

    Arrays that lie in their place already, such as streams made on other devices, stay as they are.
    Every process passes the whole batch and places the part that its devices hold: which rows
    train together depends on the data alone, never on the number of processes. Without a mesh the
    arrays go to the default device. Raises UserError where rows or tokens do not divide.
    """
    return jax.tree.map(lambda x: put(x, mesh), batch)


def put(x: Any, mesh: Mesh | None = None) -> jax.Array:
    """One array of a batch, as `feed` places it."""
    if mesh is None or mesh.size == 1:
        return jax.device_put(x, None if mesh is None else mesh.devices.item())
    sharding = place_of(x.shape, mesh)
    if isinstance(x, jax.Array) and x.sharding.is_equivalent_to(sharding, x.ndim):
        return x
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def put_rows(x: Any, mesh: Mesh | None = None) -> jax.Array:
    """An array [A, B, ...] that does not go by tokens, its rows where those of a batch are."""
    if mesh is None or mesh.size == 1:
        return put(x, mesh)
    sharding = NamedSharding(mesh, PartitionSpec(None, RULES["rows"]))
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def place_of(shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    """Where an array of a batch, [A, B, T, ...] or a denominator, lies on a mesh; UserError where
    rows or tokens do not divide."""
    if len(shape) < 3:
        return NamedSharding(mesh, PartitionSpec())
    check_divides(shape[1], shape[2], mesh)
    spec = PartitionSpec(None, RULES["rows"], RULES["length"], *(None,) * (len(shape) - 3))
    return NamedSharding(mesh, spec)


def check_divides(rows: int, length: int, mesh: Mesh) -> None:
    """UserError unless `rows` of a microstep of `length` tokens each can be split on the mesh."""
    ways = row_shards(mesh)
    if rows % ways:
        raise UserError(
            f"{rows} rows a microstep cannot be split {ways} ways (mesh axes "
            f"{' x '.join(RULES['rows'])}); make the rows per microstep a multiple of {ways}"
        )
    ways = count_ways(mesh_axes("length", mesh), mesh)
    if length % ways:
        raise UserError(
            f"a row of {length} tokens cannot be split {ways} ways (parallel.context); make the"
            " sequence length a multiple of it"
        )
