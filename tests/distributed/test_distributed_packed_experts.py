"""Experts in few bits with adapters, cut over devices: the step of one device."""

import functools

import jax
import mesh_worker
import numpy as np
import pytest

from jaxtrain.adapters.spec import Adapter
from jaxtrain.distributed.mesh import make_mesh

WIDE = {**mesh_worker.RAW["qwen3_moe"], "hidden_size": 64, "moe_intermediate_size": 64}


@pytest.mark.thorough
def test_packed_experts_on_devices_train_as_on_one(monkeypatch):
    monkeypatch.setattr(mesh_worker, "RAW", {"wide": WIDE})
    monkeypatch.setattr(mesh_worker, "Adapter", functools.partial(Adapter, quantize="nf4"))
    batch = mesh_worker.make_batch("documents", 1)
    meshes = (make_mesh(jax.devices()[:1]), make_mesh(jax.devices()[:2], expert=2))
    (single_loss, single_grads), (mesh_loss, mesh_grads) = (
        mesh_worker.run("wide", batch, m, "lora") for m in meshes
    )
    assert mesh_loss == pytest.approx(single_loss, rel=1e-6)
    assert any("experts" in path for path in single_grads)
    for path, grad in single_grads.items():  # as in test_distributed_exactness.py
        assert np.abs(mesh_grads[path] - grad).max() <= 4e-6 * np.abs(grad).max(), path
