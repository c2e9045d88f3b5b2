"""Mesh sizes, the table of axes, and the feed, on four fake devices."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxtrain.batch import Batch
from jaxtrain.distributed.feed import feed, row_shards
from jaxtrain.distributed.mesh import AXES, make_mesh, require_host_memory, resolve_sizes
from jaxtrain.distributed.sharding import constrain, partition_spec, split_axes
from jaxtrain.errors import UserError


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"fsdp": -1}, (1, 8, 1, 1, 1)),
        ({"data": 2, "fsdp": -1, "tensor": 2}, (2, 2, 1, 1, 2)),
        ({"data": 8}, (8, 1, 1, 1, 1)),
        ({"data": -1, "fsdp": 8}, (1, 8, 1, 1, 1)),
        ({"fsdp": -1, "context": 2, "tensor": 4}, (1, 1, 1, 2, 4)),
    ],
)
def test_the_open_axis_takes_the_rest(sizes, expected):
    assert tuple(resolve_sizes(sizes, 8)[axis] for axis in AXES) == expected


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"model": 2}, "unknown mesh axis 'model'"),
        ({"data": -1, "fsdp": -1}, "only one axis"),
        ({"fsdp": 3, "data": -1}, "cannot be divided"),
        ({"fsdp": 4}, "need 4 devices, but there are 8"),
        ({"tensor": 0}, "parallel.tensor=0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes, words):
    with pytest.raises(UserError, match=words):
        resolve_sizes(sizes, 8)


def test_partition_spec_keeps_whole_what_does_not_divide():
    mesh = make_mesh(fsdp=2, tensor=2)
    assert partition_spec(("embed", "heads"), (8, 6), mesh) == PartitionSpec(("fsdp",), ("tensor",))
    assert partition_spec(("vocab", "embed"), (97, 8), mesh) == PartitionSpec(None, ("fsdp",))
    assert split_axes(("rows", "sequence"), (2, 6), mesh) == [("fsdp",), ("tensor",)]
    assert partition_spec(("rows", None), (4, 3), mesh) == PartitionSpec(("fsdp",), None)
    mesh = make_mesh(context=2, tensor=2)
    assert split_axes(("embed", "sequence"), (6, 6), mesh) == [("context",), ("context",)]


def test_constrain_places_under_a_mesh_and_does_nothing_without():
    x = jnp.zeros((4, 6))
    assert constrain(x, "rows", None) is x
    with jax.set_mesh(make_mesh(data=2, fsdp=2)):
        y = jax.jit(lambda x: constrain(x, "rows", None))(x)
    assert y.addressable_shards[0].data.shape == (1, 6)


def batch_of(rows, length):
    shape = (2, rows, length)
    array = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    return Batch(
        tokens=array,
        positions=array,
        prev=array,
        until=array,
        weights={"nll": array.astype(np.float32)},
        denoms={"nll": np.float32(3.0)},
        since=array,
        streams={
            "target": array,
            "seen": array > 5,
            "state": np.ones((*shape, 3), ml_dtypes.bfloat16),
        },
    )


@pytest.mark.parametrize("sizes", [{"fsdp": 4}, {"data": 2, "fsdp": 2}, {"data": 2, "context": 2}])
def test_feed_splits_rows_and_tokens(sizes):
    mesh = make_mesh(**sizes)
    host = batch_of(4, 6)
    placed = feed(host, mesh)
    for device_array, host_array in zip(
        jax.tree.leaves(placed), jax.tree.leaves(host), strict=True
    ):
        np.testing.assert_array_equal(device_array, host_array)
        assert device_array.dtype == host_array.dtype
    shard = placed.tokens.addressable_shards[0].data.shape
    assert shard == (2, 4 // row_shards(mesh), 6 // sizes.get("context", 1))
    assert placed.denoms["nll"].sharding.is_fully_replicated
    long = feed(host._replace(streams={"id": np.ones((2, 4, 6), np.int64)}), mesh)
    assert long.streams["id"].dtype == np.int32  # jax's 64 bits are off


def test_feed_without_a_mesh_and_with_rows_that_do_not_divide():
    host = batch_of(3, 5)
    np.testing.assert_array_equal(feed(host).tokens, host.tokens)
    with pytest.raises(UserError, match="3 rows a microstep cannot be split 4 ways"):
        feed(host, make_mesh(fsdp=4))
    with pytest.raises(UserError, match="5 tokens cannot be split 4 ways"):
        feed(host, make_mesh(context=4))


def test_devices_that_reach_no_pinned_memory_are_refused():
    require_host_memory(make_mesh(fsdp=-1), "optim.offload")
    memories = [SimpleNamespace(kind="unpinned_host")]
    device = SimpleNamespace(device_kind="Abacus", addressable_memories=lambda: memories)
    mesh = SimpleNamespace(devices=np.asarray([device]))
    with pytest.raises(UserError, match='parallel.frozen "host" needs .* Abacus has unpinned_host'):
        require_host_memory(mesh, 'parallel.frozen "host"')
