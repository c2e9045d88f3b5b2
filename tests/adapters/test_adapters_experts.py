"""Experts in few bits: the grouped matmul on packed matrices, streamed loading, several devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families_gptoss import FAMILIES
from flax import nnx
from tiny_models import RAW, compute_logits, documents, pack
from tiny_models import SIZES as TINY

from jaxtrain.adapters.attach import attach
from jaxtrain.adapters.fused import find_tensors
from jaxtrain.adapters.merge import merge_adapter
from jaxtrain.adapters.nf4 import PackedNF4, nf4_shapes
from jaxtrain.adapters.peft import write_peft
from jaxtrain.adapters.spec import Adapter, LoRASpec, choose_slots, find_linears
from jaxtrain.adapters.storage import STORAGES, find_stored, quantize_params
from jaxtrain.core.weights import split_trained
from jaxtrain.distributed.mesh import make_mesh
from jaxtrain.distributed.sharding import partition_spec, shardings
from jaxtrain.errors import UserError
from jaxtrain.models import build, families, loading, saving
from jaxtrain.models.parameters import name_path, split_model

# In and out of no multiple of each other, 6 experts: a wrong axis or order has no shape.
SIZES = {
    "hidden_size": 128,
    "moe_intermediate_size": 192,
    "num_local_experts": 6,
    "num_hidden_layers": 2,
}
BATCH = pack([[row] for row in documents(4, 30, 30)], 30)


def open_model(kind, mesh, folder=None, **sizes):
    """(config, adapter, trained, frozen, rebuild) of a quantized mixture of experts."""
    if folder is None:
        config = families.config_from_hf({**RAW["qwen3_moe"], **SIZES, **sizes})
    else:
        config = families.read_config(folder)
    slots = choose_slots(find_linears(config), ("mlp",), LoRASpec(4, 8.0), {}, {})
    tensors = find_tensors(config) if kind == "nf4_fused" else {}
    adapter = Adapter(slots, quantize=kind, tensors=tensors)
    model = attach(build.abstract(config), adapter)
    shapes, rebuild = split_model(model)
    placed = jax.tree_util.tree_leaves_with_path(shardings(nnx.state(model), mesh))
    places = {name_path(path): position for path, position in placed}
    shapes = {
        path: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=places[path])
        for path, s in shapes.items()
    }
    layers = find_stored(shapes, kind)
    read = {"mesh": mesh, "by_layer": layers}
    if folder is None:
        params, _ = split_model(build.init(config, 3, mesh=mesh))
        base = ((path, iter(value) if path in layers else value) for path, value in params.items())
    else:
        base = loading.read_params(folder, **read)
    frozen = quantize_params(base, shapes, kind, tensors=tensors)
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
        dense[path] = STORAGES[kind].dequantize(parts, jnp.float32)
    return dense


KINDS = [
    pytest.param(kind, marks=[pytest.mark.thorough] if kind == "int8" else [])
    for kind in STORAGES
    if kind != "nf4_fused"  # test_adapters_fused.py
]


@pytest.mark.slow
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


@pytest.mark.slow
def test_no_layer_keeps_its_unpacked_matrices():
    """Twice the layers take no more temporary memory than the activations of these layers."""
    temporary = []
    for layers in (2, 4):
        sizes = {**SIZES, "num_hidden_layers": layers, "num_local_experts": 32}
        config = families.config_from_hf({**RAW["qwen3_moe"], **sizes})
        slots = choose_slots(find_linears(config), ("mlp",), LoRASpec(4, 8.0), {}, {})
        adapter = Adapter(slots, quantize="nf4")
        shapes, rebuild = split_model(attach(build.abstract(config), adapter))
        trained, frozen = split_trained(shapes, adapter)

        def loss(trained, frozen, rebuild=rebuild):
            model = rebuild({**frozen, **trained})
            return jnp.sin(model.hidden(BATCH).hidden).mean()

        lowered = jax.jit(jax.grad(loss)).lower(trained, frozen)
        temporary.append(lowered.compile().memory_analysis().temp_size_in_bytes)
    unpacked = 3 * 32 * SIZES["hidden_size"] * SIZES["moe_intermediate_size"] * 4
    assert temporary[1] - temporary[0] < unpacked


@pytest.mark.parametrize(
    ("kind", "sizes", "model"),
    [
        pytest.param(
            *("nf4", {"expert": 2, "tensor": 2}, {"moe_intermediate_size": 256}),
            marks=pytest.mark.thorough,
        ),
        # 384 blocks a matrix, so that groups of scales reach from one into the next.
        pytest.param(
            "nf4_fused",
            {"expert": 2, "tensor": 2},
            {"moe_intermediate_size": 128, "hidden_size": 192},
            marks=pytest.mark.thorough,
        ),
        ("int8", {"expert": 2, "fsdp": 2}, {"moe_intermediate_size": 256}),
    ],
    ids=str,
)
@pytest.mark.slow
def test_packed_experts_over_several_devices(kind, sizes, model):
    """Each device unpacks its own experts, or its piece of each matrix."""
    full, mesh = make_mesh(jax.devices()[:1]), make_mesh(jax.devices()[:4], **sizes)
    *_, trained, frozen, rebuild = open_model(kind, full, **model)
    expected_loss, expected = value_and_grads(rebuild, trained, frozen)
    with jax.set_mesh(mesh):
        *_, trained, frozen, rebuild = open_model(kind, mesh, **model)
        loss, grads = value_and_grads(rebuild, trained, frozen)
    assert abs(float(loss) - float(expected_loss)) < 1e-6
    for path, grad in expected.items():
        error = np.abs(np.asarray(grads[path]) - np.asarray(grad)).max()
        assert error < 1e-5 * np.abs(grad).max() + 1e-12, path


def test_blocks_that_tensor_parallelism_would_cut_are_refused():
    mesh = make_mesh(jax.devices()[:2], tensor=2)
    position = functools.partial(partition_spec, mesh=mesh)
    down, up = (PackedNF4(**nf4_shapes((6, *shape))) for shape in ((192, 128), (128, 192)))
    assert up.specs(("experts", None, "mlp"), position).nibbles[1] == "tensor"
    with pytest.raises(UserError, match="192 in blocks of 64 cannot be"):
        down.specs(("experts", "mlp", None), position)


WIDE = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16}
MERGED = {
    "qwen3_moe": {**RAW["qwen3_moe"], **SIZES},
    "gpt_oss": {**TINY, **FAMILIES["gpt_oss"], **WIDE},  # in one tensor, gate and up in turns
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt_oss", pytest.param("qwen3_moe", marks=pytest.mark.thorough)])
def test_merging_puts_every_matrix_through_the_storage_by_itself(name, tmp_path):
    config = families.config_from_hf(MERGED[name])
    saving.save(build.init(config, seed=3), config, tmp_path / "base")
    mesh = make_mesh(jax.devices()[:1])
    config, adapter, trained, frozen, rebuild = open_model("nf4", mesh, tmp_path / "base")
    write_peft(trained, config, adapter, tmp_path / "adapter", None)
    options = {"quantize": "nf4", "max_shard_bytes": 30_000}
    merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "out", **options)
    merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "plain")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1

    def logits(model):
        return np.asarray(compute_logits(model, BATCH))

    actual_values = logits(rebuild({**frozen, **trained}))
    scale = np.abs(actual_values).max()
    # fp32 sums in another order; without the round trip the quantization's error shows.
    assert np.abs(logits(loading.load(tmp_path / "out")) - actual_values).max() < 1e-4 * scale
    assert np.abs(logits(loading.load(tmp_path / "plain")) - actual_values).max() > 1e-3 * scale
