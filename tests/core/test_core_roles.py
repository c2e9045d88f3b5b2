"""Memory in which the models beside the trained one wait."""

import dataclasses
import gc

import jax
import numpy as np
import pytest
from tiny_models import RAW

from jaxtrain.core import roles
from jaxtrain.core.bundle import ModelBundle
from jaxtrain.core.roles import Role, Roles
from jaxtrain.distributed.mesh import HOST_MEMORY, make_mesh
from jaxtrain.models import build, families, saving


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    """A model that trains, and another one in a folder, on two devices."""
    config, folder = families.config_from_hf(RAW["qwen3"]), tmp_path_factory.mktemp("teacher")
    saving.save(build.init(config, 7), config, folder)
    mesh = make_mesh(jax.devices()[:2], fsdp=2)
    policy = ModelBundle(None, config, mesh, None, {"param_dtype": "float32"})
    return policy, ModelBundle(folder, config, mesh, None, {"param_dtype": "float32"})


@pytest.mark.parametrize(
    "source",
    [pytest.param(name, marks=pytest.mark.slow) for name in ("folder", "drawn")] + ["start"],
)
def test_weights_that_wait_on_the_host_pass_the_devices_one_by_one(bundles, source, monkeypatch):
    policy, teacher = bundles
    bundle = teacher if source == "folder" else policy
    other = Role(bundle, "start" if source == "start" else "own", in_loss=False)
    _, expected, _ = Roles({"policy": Role(policy), "other": other}).open(0)
    assert {value.sharding.memory_kind for value in expected.values()} == {"device"}
    expected = {path: np.asarray(value) for path, value in expected.items()}

    put, held, before = jax.device_put, [], count_device_bytes()

    def record(value, place):
        if getattr(place, "memory_kind", None) == HOST_MEMORY:
            held.append(count_device_bytes() - before)
        return put(value, place)

    monkeypatch.setattr(roles.jax, "device_put", record)
    other = dataclasses.replace(other, on_host=True)
    trained, actual, _ = Roles({"policy": Role(policy), "other": other}).open(0)
    assert {value.sharding.memory_kind for value in actual.values()} == {HOST_MEMORY}
    assert actual.keys() == expected.keys() and len(held) == len(actual)
    for path, value in expected.items():
        np.testing.assert_array_equal(np.asarray(actual[path]), value)
    # Beside the trained weights one array, and numbers for the check of what was read.
    largest = max(value.nbytes for value in expected.values())
    assert max(held) <= sum(value.nbytes for value in trained.values()) + largest + 1000


def count_device_bytes():
    gc.collect()
    arrays = [x for x in jax.live_arrays() if x.sharding.memory_kind != HOST_MEMORY]
    return sum(x.nbytes for x in arrays)
