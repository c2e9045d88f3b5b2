"""Transfer of host batches to global device arrays, rows over data, fsdp and expert, tokens over
context; and of arrays back to the host."""

from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtrain.batch import Batch
from jaxtrain.distributed.sharding import RULES, count_ways, mesh_axes
from jaxtrain.errors import UserError


def row_shards(mesh: Mesh) -> int:
    """Return the number of ways the rows of a batch are split; their number must be a multiple of
    it."""
    return count_ways(RULES["rows"], mesh)


def feed(batch: Batch, mesh: Mesh | None = None) -> Batch:
    """Transfer a host Batch [A, B, T] to device arrays of the same dtypes.

    64-bit types become 32-bit unless jax enables them; `denoms`, numbers or [A], are copied to
    every device. Arrays with the right sharding already, such as streams made on other devices,
    stay as they are. Every process passes the whole batch and places the part of its devices: which
    rows train together depends on the data alone, never on the number of processes. Without a mesh
    the arrays go to the default device. Raises UserError if rows or tokens do not divide.
    """
    fed = jax.tree.map(lambda x: put(x, mesh), batch._replace(images=None))
    # Images lie with their row: a device may hold tokens of any image of it.
    return fed._replace(images=jax.tree.map(lambda x: put_rows(x, mesh), batch.images))


def put(x: Any, mesh: Mesh | None = None, sharding: NamedSharding | None = None) -> jax.Array:
    """Place one array of a batch as `feed` does, or by `sharding` on a mesh of several devices."""
    if mesh is None or mesh.size == 1:
        return jax.device_put(x, None if mesh is None else mesh.devices.item())
    sharding = sharding or place_of(x.shape, mesh)
    if isinstance(x, jax.Array) and x.sharding.is_equivalent_to(sharding, x.ndim):
        return x
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def put_rows(x: Any, mesh: Mesh | None = None) -> jax.Array:
    """Place an array [A, B, ...] without a token axis, sharded like the rows of a batch."""
    if mesh is None or mesh.size == 1:
        return put(x, mesh)
    return put(x, mesh, NamedSharding(mesh, PartitionSpec(None, RULES["rows"])))


def place_of(shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    """Return the sharding of a batch's array, [A, B, T, ...] or a denominator; UserError if rows or
    tokens do not divide."""
    if len(shape) < 3:
        return NamedSharding(mesh, PartitionSpec())
    check_divides(shape[1], shape[2], mesh)
    spec = PartitionSpec(None, RULES["rows"], RULES["length"], *(None,) * (len(shape) - 3))
    return NamedSharding(mesh, spec)


def check_divides(rows: int, length: int, mesh: Mesh) -> None:
    """Raise UserError unless `rows` of a microstep of `length` tokens each can be split on the
    mesh."""
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


def to_host(array: Any) -> np.ndarray:
    """Return the whole array in numpy, gathered over processes if needed."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return multihost_utils.process_allgather(array, tiled=True)
    return np.asarray(array)
