"""Arrays that change meshes, and batches of which a part lies on the devices already."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.distributed.feed import place_of
from jaxtrain.distributed.mesh import make_mesh
from jaxtrain.distributed.reshard import move


def place(devices, *axes):
    mesh = jax.make_mesh((len(devices),), ("x",), devices=devices)
    return NamedSharding(mesh, PartitionSpec(*axes))


@pytest.mark.parametrize(
    "source, axes, target, spec",
    [
        (slice(0, 1), (None,), slice(1, 4), (None, "x")),  # one to three
        (slice(0, 2), (None, "x"), slice(2, 4), (None, "x")),  # as it is
        (slice(0, 2), (None, "x"), slice(2, 4), (None, None, "x")),  # across
        (slice(0, 3), (None, "x"), slice(3, 4), ()),  # three joined on one
        (slice(0, 3), (None, "x"), slice(2, 4), (None, "x")),  # cut in the middle of a piece
    ],
)
def test_an_array_arrives_whole_without_passing_the_host(source, axes, target, spec):
    x = np.arange(2 * 6 * 4 * 3, dtype=np.float32).reshape(2, 6, 4, 3)
    devices = jax.devices()
    held = jax.device_put(x, place(devices[source], *axes))
    sharding = place(devices[target], *spec)
    training = make_mesh(devices[target], fsdp=-1)
    with jax.transfer_guard_device_to_host("disallow"), jax.set_mesh(training):
        moved = move(held, sharding)
    assert moved.sharding == sharding
    np.testing.assert_array_equal(moved, x)


def test_padding_stays_behind():
    x = np.arange(48.0).reshape(1, 6, 8)
    devices = jax.devices()
    held = jax.device_put(x, place(devices[:2], None, "x"))
    moved = move(held, place(devices[2:3]), (1, 5, 8))
    np.testing.assert_array_equal(moved, x[:, :5])


def test_rows_that_do_not_divide_are_refused_by_place_of():
    mesh = make_mesh(jax.devices()[:3], fsdp=-1)
    assert place_of((1, 3, 8, 5), mesh).shard_shape((1, 3, 8, 5)) == (1, 1, 8, 5)
    with pytest.raises(ValueError, match="cannot be split 3 ways"):
        place_of((1, 4, 8), mesh)


def test_a_mesh_of_one_device_is_left_as_well():
    x = np.arange(6 * 8.0).reshape(1, 6, 8)
    alone = make_mesh(jax.devices()[3:], fsdp=-1)
    with jax.set_mesh(alone):  # as a program of that mesh puts it out
        held = jax.jit(lambda x: x + 0)(jax.device_put(x, place_of(x.shape, alone)))
    training = make_mesh(jax.devices()[:3], fsdp=-1)
    with jax.set_mesh(training):
        moved = move(held, place_of((1, 6, 8), training))
    np.testing.assert_array_equal(moved, x)
