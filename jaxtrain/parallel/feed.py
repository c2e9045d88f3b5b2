"""Host batches to global device arrays: rows over data and fsdp, tokens over context."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtrain.batch import Batch
from jaxtrain.errors import UserError
from jaxtrain.parallel.rules import RULES


def row_shards(mesh: Mesh) -> int:
    """Number of ways the rows of a batch are split: the rows axis must be a multiple of it."""
    return int(np.prod([mesh.shape[axis] for axis in RULES["rows"]]))


def row_group(mesh: Mesh) -> tuple[int, int]:
    """(index, count): this process loads slice `index` of `count` of every batch's rows.

    Processes that differ only along tensor, context or expert hold the same rows and get the same
    index.
    """
    ways = row_shards(mesh)
    sharding = NamedSharding(mesh, PartitionSpec(RULES["rows"]))
    held: dict[int, set[int]] = {}
    for device, index in sharding.devices_indices_map((ways,)).items():
        held.setdefault(device.process_index, set()).add(index[0].start or 0)
    groups = sorted({tuple(sorted(rows)) for rows in held.values()})
    return groups.index(tuple(sorted(held[jax.process_index()]))), len(groups)


def feed(batch: Batch, mesh: Mesh | None = None) -> Batch:
    """Host Batch [A, B, T] to device arrays; `denoms` (scalars) are copied to every device.

    With several processes each passes the rows [A, B / count, T] of its `row_group` and equal
    `denoms`; the result is the global Batch [A, B, T] on every process. Without a mesh the
    arrays go to the default device. Raises UserError where the rows do not divide.
    """
    if mesh is None or mesh.size == 1:
        return jax.tree.map(jax.device_put, batch)
    return jax.tree.map(lambda x: _place(np.asarray(x), mesh), batch)


def _place(x: np.ndarray, mesh: Mesh) -> jax.Array:
    if x.ndim < 3:  # denominators
        return jax.make_array_from_process_local_data(NamedSharding(mesh, PartitionSpec()), x)
    rows, ways = x.shape[1] * row_group(mesh)[1], row_shards(mesh)
    if rows % ways:
        raise UserError(
            f"{rows} rows a microstep cannot be split {ways} ways (mesh axes "
            f"{' x '.join(RULES['rows'])}); make the rows per microstep a multiple of {ways}"
        )
    length: Any = RULES["length"]
    if x.shape[2] % mesh.shape[length[0]]:
        raise UserError(
            f"a row of {x.shape[2]} tokens cannot be split {mesh.shape[length[0]]} ways "
            f"(parallel.{length[0]}); make the sequence length a multiple of it"
        )
    spec = PartitionSpec(None, RULES["rows"], length, *(None,) * (x.ndim - 3))
    return jax.make_array_from_process_local_data(NamedSharding(mesh, spec), x)
