"""The model of a step: what it counts by hand, and which meshes it finds."""

import math

import pytest

from jaxtrain.core.metrics import peak_flops
from jaxtrain.distributed.mesh import AXES
from jaxtrain.errors import UserError
from jaxtrain.runs.estimate import estimate as model
from jaxtrain.runs.estimate.devices import DEVICES, find_device, read_devices
from jaxtrain.runs.estimate.estimate import GIB, Sizes, StepRows, collective_seconds, estimate
from jaxtrain.runs.estimate.search import ROOM, SearchTarget, factorize, find_meshes, name_mesh
from jaxtrain.runs.estimate.work import ParameterArray, StepWork

H200 = DEVICES["h200"]


def sizes(**axes) -> Sizes:
    return Sizes({axis: axes.get(axis, 1) for axis in AXES})


def make_work(layers=32, hidden=4096, experts=1, **changed) -> StepWork:
    """Square matrices, four a layer; with experts as many of these in each layer."""
    axes = ("layers", "embed", "mlp")
    arrays = [ParameterArray((layers, hidden, 4 * hidden), axes, 4, 2.0, True)]
    if experts > 1:
        axes = ("layers", "experts", "expert_embed", "mlp")
        arrays.append(ParameterArray((layers, experts, hidden, hidden // 4), axes, 4, 2.0, True))
    dense = layers * 4.0 * hidden**2
    facts = {
        "arrays": tuple(arrays),
        "layers": layers,
        "hidden": hidden,
        "dense": dense,
        "dense_again": dense,
        "dense_trained": dense,
        "experts": 0.0,
        "experts_trained": 0.0,
        "expert_layers": layers if experts > 1 else 0,
        "experts_per_token": 1,
        "outputs": layers * 4.0 * hidden,
        "mixed": layers * hidden,
        "heads": 8,
        "num_experts": experts,
        "remat": "save_attention",
        "mixing": lambda tokens: 2.0 * tokens**2 * hidden * layers,
    }
    return StepWork(**facts | changed)


def test_a_step_by_hand():
    work, rows = make_work(), StepRows(8192, 1)
    actual = estimate(work, sizes(fsdp=4), rows, H200)
    rate = model.DENSE_SHARE * 4096 / (4096 + model.DENSE_HALF) * 989e12
    assert actual.parts["layers and head"] == pytest.approx(8192 * 2 * 4 * work.dense / rate)
    assert actual.parts["attention"] == pytest.approx(
        3.5 * work.mixing(8192) / (model.MIXING_SHARE * 989e12)
    )
    bytes_bf16 = 2 * work.dense
    links = model.LINK_SHARE * 450e9
    assert actual.parts["weights"] == pytest.approx(3 * bytes_bf16 / links)
    assert actual.seconds == pytest.approx(sum(actual.parts.values()))
    flops = 6 * work.dense * 8192 + 3 * work.mixing(8192)
    assert actual.mfu == pytest.approx(flops / actual.seconds / 989e12)
    assert actual.gib["weights"] == actual.gib["gradients"] == pytest.approx(work.dense / GIB)
    assert actual.gib["optimizer"] == pytest.approx(2 * work.dense / GIB)
    extra = estimate(work, sizes(fsdp=4), StepRows(8192, 1, microsteps=2), H200)
    assert extra.parts["weights"] == pytest.approx(2 * actual.parts["weights"])
    assert extra.parts["optimizer"] == actual.parts["optimizer"]


def test_a_collective_within_a_host_and_beyond():
    full, links = 1e9, model.LINK_SHARE * 450e9
    within = collective_seconds(full, ("fsdp",), sizes(fsdp=8), H200)
    assert within == pytest.approx(full / links)
    network = model.NETWORK_SHARE * 50e9
    # Two hosts: half of the array comes from the other, through eight adapters.
    assert collective_seconds(full, ("fsdp",), sizes(fsdp=16), H200) == pytest.approx(
        max(full / 2 / 8 / network, full / links)
    )
    # With eight devices of a host inside of each member, one adapter for each group.
    alone = collective_seconds(full, ("fsdp",), sizes(fsdp=2, tensor=8), H200)
    assert alone == pytest.approx(full / 2 / network)
    slice_ = collective_seconds(full, ("fsdp",), sizes(fsdp=256), DEVICES["v5e"])
    assert slice_ == pytest.approx(full / (model.LINK_SHARE * 100e9))


@pytest.mark.parametrize("count", [1, 8, 64])
def test_meshes_divide_what_they_cut_and_fit(count):
    work, expected = make_work(experts=16), SearchTarget(8192, 1, 64)
    meshes = find_meshes(work, expected, H200, count)
    assert meshes
    rates = [entry.estimate.tokens_per_second for entry in meshes]
    for entry in meshes:
        assert math.prod(entry.mesh.values()) == count
        shards = entry.mesh["data"] * entry.mesh["fsdp"] * entry.mesh["expert"]
        assert 64 % shards == 0 and 8 % entry.mesh["tensor"] == 0 and 16 % entry.mesh["expert"] == 0
        assert 8192 % entry.mesh["context"] == 0
        assert entry.estimate.memory <= ROOM * 140
    # The simplest of those that are alike stands for them, so neighbors may be that far apart.
    assert all(b <= a * 1.011 for a, b in zip(rates, rates[1:], strict=False))


def test_what_does_not_fit_is_not_named():
    assert not find_meshes(make_work(), SearchTarget(8192, 1, 64), H200, 48), "three of nothing"
    large = make_work(layers=512)
    assert not find_meshes(large, SearchTarget(8192, 1, None), H200, 2)
    meshes = find_meshes(large, SearchTarget(8192, 1, None), H200, 64)
    assert meshes and name_mesh(meshes[0].mesh) != "data=64"
    rows_of_three = SearchTarget(8192, 1, 3)
    assert [name_mesh(mesh.mesh) for mesh in find_meshes(make_work(), rows_of_three, H200, 1)] == [
        "one device"
    ]
    assert all(
        mesh.mesh["data"] * mesh.mesh["fsdp"] == 1
        for mesh in find_meshes(make_work(), rows_of_three, H200, 4)
    )


def test_factorisations_are_all_and_each_once():
    actual = list(factorize(12, 3))
    assert len(actual) == len(set(actual)) == 18
    assert all(math.prod(entry) == 12 for entry in actual)


def test_devices_by_name():
    assert read_devices("H200:64") == (H200, 64)
    for text, output in [
        ("h20:8", "'h20' is unknown; choose one of h200, h100"),
        ("h200", "write h200:COUNT, such as h200:8"),
        ("h200:0", "write h200:COUNT"),
        ("h200:x8", "write h200:COUNT"),
    ]:
        with pytest.raises(UserError, match=output):
            read_devices(text)
    kinds = {
        "NVIDIA H200": "h200",
        "NVIDIA H100 80GB HBM3": "h100",
        "NVIDIA A100-SXM4-80GB": "a100",
        "NVIDIA L40S": "l40s",
        "NVIDIA L4": "l4",
        "TPU v5 lite": "v5e",
        "TPU v5": "v5p",
        "TPU v6 lite": "v6e",
    }
    assert {kind: find_device(kind) for kind in kinds} == {
        kind: DEVICES[name] for kind, name in kinds.items()
    }
    for unknown in ("cpu", "NVIDIA GeForce RTX 4090", "NVIDIA L40"):
        assert find_device(unknown) is None, unknown
    assert peak_flops("NVIDIA L40", "bfloat16", None) == 181e12
    assert peak_flops("NVIDIA L4", "bfloat16", None) == 121e12


def test_inputs_of_blocks_that_wait_on_the_host_take_time_there_and_back():
    rows = StepRows(8192, 2, microsteps=3)
    full, offload = make_work(remat="full"), make_work(remat="offload")
    before, after = (estimate(work, sizes(), rows, H200) for work in (full, offload))
    copied = 2 * 3 * (2 * 8192) * 32 * 4096 * 2 / 64e9
    assert after.seconds - before.seconds == pytest.approx(copied)
    assert after.parts["copies to the host"] == pytest.approx(copied)
    assert "copies to the host" not in estimate(offload, sizes(), rows, DEVICES["v5e"]).parts
