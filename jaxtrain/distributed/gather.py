"""Gathering of sharded parameters of all processes on devices of process 0.

Every process takes part, parameter by parameter and piece by piece: a piece is copied to all
devices (a collective), process 0 stores it, the others discard it. Each piece is awaited before the
next is started: a process that ran ahead would hold many pieces at once, and on CPUs, whose
programs share a few threads, later collectives could starve the ones that other processes wait for.
"""

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

PIECE_BYTES = 256 * 2**20
"""Memory of a device for a parameter beyond its own shard, if it can be cut into pieces."""


def gather_params(
    params: Mapping[str, jax.Array], targets: Mapping[str, Sharding], piece_bytes: int = PIECE_BYTES
) -> dict[str, jax.Array]:
    """Return copies of all parameters, each with `targets[path]` on devices of process 0; {}
    elsewhere.

    Every process calls this with the same parameters in the same order; `targets` are read on
    process 0. If one process has all devices, arrays that are in place are not copied.
    """
    gathered = {}
    for path, value in params.items():
        target = targets[path] if jax.process_index() == 0 else None
        copy = _gather(value, target, piece_bytes)
        if copy is not None:
            gathered[path] = copy
    return gathered


def _gather(value: jax.Array, target: Sharding | None, piece_bytes: int) -> jax.Array | None:
    """Return the array with sharding `target`; None: take part in the collective and discard it."""
    if value.is_fully_addressable:
        return None if target is None else jax.device_put(value, target)
    mesh = _mesh(value.sharding)
    pieces = cut_pieces(value, piece_bytes)
    if pieces is None:
        replicated = jax.block_until_ready(_replicator(mesh)(value))
        return (
            None if target is None else jax.device_put(_copy_on(replicated, _mesh(target)), target)
        )
    axis, size = pieces
    take = _slicer(mesh, axis, size)
    buffer = None if target is None else jnp.zeros(value.shape, value.dtype, device=target)
    for start in range(0, value.shape[axis], size):
        start = np.int32(min(start, value.shape[axis] - size))  # the last two may overlap
        piece = jax.block_until_ready(take(value, start))
        if target is not None:
            with jax.set_mesh(_mesh(target)):  # around this stands the trainer's
                buffer = _putter(target, axis)(buffer, _copy_on(piece, _mesh(target)), start)
    return buffer


def cut_pieces(value: jax.Array, piece_bytes: int) -> tuple[int, int] | None:
    """Return (axis, indices per piece) for an axis that is not sharded, so that slicing it moves
    nothing. None: the array is small, or has no such axis, and is gathered whole."""
    assert isinstance(value.sharding, NamedSharding)
    spec = [*value.sharding.spec, *[None] * value.ndim]
    free = [axis for axis, size in enumerate(value.shape) if size > 1 and not spec[axis]]
    if value.nbytes <= piece_bytes or not free:
        return None
    size = value.shape[free[0]]
    return free[0], max(1, piece_bytes * size // value.nbytes)


def _mesh(sharding: Sharding) -> Mesh:
    """The devices of an array of parameters, which always lies on a mesh."""
    assert isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh), sharding
    return sharding.mesh


@functools.cache
def _replicator(mesh: Mesh):
    return jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))


@functools.cache
def _slicer(mesh: Mesh, axis: int, size: int):
    def take(x, start):
        return jax.lax.dynamic_slice_in_dim(x, start, size, axis)

    return jax.jit(take, out_shardings=NamedSharding(mesh, PartitionSpec()))


@functools.cache
def _putter(target: Sharding, axis: int):
    def put(x, piece, start):
        return jax.lax.dynamic_update_slice_in_dim(x, piece, start, axis)

    return jax.jit(put, out_shardings=target, donate_argnums=0)


def _copy_on(replicated: jax.Array, mesh: Mesh) -> jax.Array:
    """Return the copies that devices of a process's own mesh already hold, as an array of that
    mesh."""
    shards = {shard.device: shard.data for shard in replicated.addressable_shards}
    copies = [shards[device] for device in mesh.devices.flat]
    sharding = NamedSharding(mesh, PartitionSpec())
    return jax.make_array_from_single_device_arrays(replicated.shape, sharding, copies)
