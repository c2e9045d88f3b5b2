"""Experts in few bits: the grouped matmul on packed matrices, streamed loading, several devices."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxtrain.adapters.attach import attach, split_trained
from jaxtrain.adapters.spec import Adapter, LoRASpec, choose_slots, find_linears
from jaxtrain.adapters.storage import STORAGES, find_stored, quantise_params
from jaxtrain.models import build
from jaxtrain.models.parameters import name_path, split_model
from jaxtrain.parallel.mesh import make_mesh
from jaxtrain.parallel.rules import shardings

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from tiny_models import RAW, documents, pack

# In and out of no multiple of each other, 6 experts: a wrong axis or order has no shape.
SIZES = {
    "hidden_size": 128,
    "moe_intermediate_size": 192,
    "num_local_experts": 6,
    "num_hidden_layers": 2,
}
BATCH = pack([[row] for row in documents(4, 30, 30)], 30)


def open_model(kind, mesh, folder=None, target=("mlp",), dtype="float32"):
    """(config, adapter, trained, frozen, rebuild) of a quantised mixture of experts."""
    if folder is None:
        config = build.config_from_hf({**RAW["qwen3_moe"], **SIZES})
    else:
        config = build.read_config(folder)
    slots = choose_slots(find_linears(config), target, LoRASpec(4, 8.0), {}, {})
    adapter = Adapter(slots, quantize=kind)
    model = attach(build.abstract(config, dtype=dtype), adapter)
    shapes, rebuild = split_model(model)
    placed = jax.tree_util.tree_leaves_with_path(shardings(nnx.state(model), mesh))
    places = {name_path(path): place for path, place in placed}
    shapes = {
        path: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=places[path])
        for path, s in shapes.items()
    }
    layers = find_stored(shapes, kind)
    read = {"mesh": mesh, "by_layer": layers}
    drawn = build.draw_params(config, 3, **read)
    base = drawn if folder is None else build.read_params(folder, **read)
    frozen = quantise_params(base, shapes, kind)
    trained, _ = split_trained(shapes, adapter)
    rng = np.random.default_rng(0)
    trained = {
        path: jax.device_put(0.2 * rng.standard_normal(s.shape).astype(np.float32), s.sharding)
        for path, s in sorted(trained.items())
    }
    assert {**trained, **frozen}.keys() == shapes.keys()
    return config, adapter, trained, frozen, rebuild


def value_and_grads(rebuild, trained, frozen):
    def loss(trained, frozen):
        model = rebuild({**frozen, **trained})
        return jnp.sin(model.logits(model.hidden(BATCH).hidden)).mean()

    return jax.jit(jax.value_and_grad(loss))(trained, frozen)


def unpack_all(frozen, kind):
    """The frozen parameters with kernels as arrays, by the storage's own definition."""
    dense = dict(frozen)
    for path in find_stored(frozen, kind):
        names = list(STORAGES[kind].shapes((64, 64)))
        parts = {name: dense.pop(f"{path}.{name}") for name in names}
        dense[path] = STORAGES[kind].dequantise(parts, jnp.float32)
    return dense


KINDS = [
    pytest.param(kind, marks=[pytest.mark.slow] if kind == "mxfp4" else []) for kind in STORAGES
]


@pytest.mark.parametrize("kind", KINDS)
def test_packed_experts_compute_what_their_unpacked_matrices_do(kind):
    mesh = make_mesh(jax.devices()[:1])
    config, adapter, trained, frozen, rebuild = open_model(kind, mesh)
    packed = [path for path in find_stored(frozen, kind) if ".experts." in path]
    assert len(packed) == 3
    _, plain = split_model(attach(build.abstract(config), Adapter(adapter.slots)))
    loss, grads = value_and_grads(rebuild, trained, frozen)
    expected_loss, expected = value_and_grads(plain, trained, unpack_all(frozen, kind))
    assert abs(loss - expected_loss) < 1e-6
    for path, grad in expected.items():
        assert np.abs(grads[path] - grad).max() < 1e-5 * np.abs(grad).max() + 1e-12, path
        assert np.abs(grad).max() > 0, path
