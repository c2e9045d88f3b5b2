"""Weights of the local sampler: the trainer's numbers, rounded as layers would, elsewhere."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.adapters.spec import Adapter, LoRASpec
from jaxtrain.core.bundle import ModelBundle
from jaxtrain.core.weights import abstract_params, open_params
from jaxtrain.distributed.mesh import make_mesh
from jaxtrain.generation.local.weights import Copier, make_sampler_mesh
from jaxtrain.models import families

ARCHITECTURE = families.config_from_hf(
    {
        "model_type": "qwen3",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "tie_word_embeddings": False,
    }
)
OPTIONS = {"param_dtype": "float32", "dtype": "bfloat16"}
TOKENS = np.arange(10, dtype=np.int32)[None]


def open_parts(mesh, adapter=None):
    return ModelBundle(None, ARCHITECTURE, mesh, None, OPTIONS, adapter)


def run(parts, params, mesh):
    model = abstract_params(parts)[1](params)
    with jax.set_mesh(mesh):
        actual = jax.jit(type(model).decode)(model, TOKENS, model.init_cache(1, 10))
        return np.asarray(model.logits(actual.hidden).astype(jnp.float32))


@pytest.mark.parametrize(
    ("local_value", "cut"),
    [
        pytest.param(False, {"fsdp": 2}, id="shared", marks=pytest.mark.thorough),
        pytest.param(True, {"tensor": 2}, id="set aside", marks=pytest.mark.slow),
    ],
)
def test_copies_compute_what_the_trainer_computes(local_value, cut):
    devices = jax.devices()
    trainer = make_mesh(devices[:2], **cut)
    parts = open_parts(trainer)
    params = open_params(parts, 0)
    mesh = make_sampler_mesh(devices[2:4] if local_value else devices[:2], trainer)
    copies = Copier(parts, mesh)(params)
    assert mesh.shape["tensor"] == cut.get("tensor", 1)
    actual, expected = run(parts, copies, mesh), run(parts, params, trainer)
    # bfloat16: the same roundings, but partial sums of two devices are rounded, too.
    np.testing.assert_allclose(actual, expected, atol=0.02 * np.abs(expected).max())
    kernel = copies["stack.block.attention.q.kernel"]
    assert kernel.dtype == jnp.bfloat16 and kernel.sharding.mesh == mesh
    assert copies["norm.scale"].dtype == jnp.float32
    for value in params.values():
        value.delete()  # as the optimizer step does
    np.testing.assert_array_equal(run(parts, copies, mesh), actual)


@pytest.mark.slow
def test_only_what_is_trained_is_copied_where_nothing_else_changes():
    mesh = make_mesh(jax.devices()[:1])
    slots = {"stack.block.attention.q": LoRASpec(4, 8.0, False, False)}
    parts = open_parts(mesh, Adapter(slots, (), "float32"))
    parts = dataclasses.replace(parts, options={"param_dtype": "bfloat16", "dtype": "bfloat16"})
    params = open_params(parts, 0)
    copies = Copier(parts, mesh)(params)
    assert copies.keys() == params.keys()
    for path, value in params.items():
        same = copies[path].unsafe_buffer_pointer() == value.unsafe_buffer_pointer()
        assert same == (".adapter." not in path), path
        np.testing.assert_array_equal(copies[path], value)
