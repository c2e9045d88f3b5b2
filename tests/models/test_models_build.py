"""Loading and saving: bit-identical, sharded like unsharded, one message for what does not fit."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from families_experts import FAMILIES as EXPERTS
from flax import nnx
from safetensors.numpy import load_file, save_file
from tiny_models import RAW, SIZES, documents, pack

from jaxtrain.config.model import ModelConfig
from jaxtrain.core.bundle import check_backends, model_options
from jaxtrain.distributed.mesh import make_mesh
from jaxtrain.errors import UserError
from jaxtrain.layers.linear import LayerInit
from jaxtrain.layers.moe import MoE
from jaxtrain.models import build, families, finite, loading, saving
from jaxtrain.models.parameters import split_model

MESHES = [
    {"data": 2, "fsdp": 2},
    {"fsdp": 2, "tensor": 2},
    {"tensor": 4},  # more than there are kv heads
    {"fsdp": 2, "context": 2},
]


def write_checkpoint(folder, name, seed=0, copy_head=False):
    """A folder with random bits in bfloat16, and norms in float32; its tensors."""
    config = families.config_from_hf(RAW[name])
    rng = np.random.default_rng(seed)
    tensors = {}
    state = build.abstract(config)
    shapes = {
        ".".join(map(str, p)): v.get_value().shape for p, v in nnx.to_flat_state(nnx.state(state))
    }
    for entry in families.family(config).names(config):
        for tensor, shape in entry.op.shapes(shapes[entry.param]).items():
            dtype = np.float32 if "norm" in tensor else ml_dtypes.bfloat16
            tensors[tensor] = (0.2 * rng.standard_normal(shape)).astype(dtype)
    if copy_head:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    folder.mkdir(exist_ok=True)
    names = sorted(tensors)
    shards = {
        "model-00001-of-00002.safetensors": names[::2],
        "model-00002-of-00002.safetensors": names[1::2],
    }
    for file, held in shards.items():
        save_file({n: tensors[n] for n in held}, folder / file, metadata={"format": "pt"})
    weight_map = {n: file for file, held in shards.items() for n in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(RAW[name]))
    return tensors


def test_what_rounding_takes_of_the_changes_is_returned(tmp_path):
    before = write_checkpoint(tmp_path / "base", "qwen3_moe_mixed")
    model = loading.load(tmp_path / "base", param_dtype="float32", dtype="float32")
    graph, state = nnx.split(model)
    changed = nnx.merge(graph, jax.tree.map(lambda x: x + 3e-4 * np.sign(x), state))
    config = families.read_config(tmp_path / "base")
    exact = saving.save(changed, config, tmp_path / "wide", "float32", tmp_path / "base")
    loss = saving.save(changed, config, tmp_path / "narrow", base=tmp_path / "base")
    rounding = change = 0.0
    for old in before.values():
        if old.dtype == ml_dtypes.bfloat16:
            old = old.astype(np.float64)
            new = (old.astype(np.float32) + np.float32(3e-4) * np.sign(old)).astype(np.float32)
            stored = new.astype(ml_dtypes.bfloat16).astype(np.float64)
            rounding += np.square(stored - new).sum()
            change += np.square(new - old).sum()
    assert exact.share == 0 and loss.share > loss.NOTED
    assert loss.share == pytest.approx(np.sqrt(rounding / change), rel=1e-4)


@pytest.mark.parametrize(
    ("name", "copy_head"),
    [("qwen3", False), ("qwen3", True), ("qwen2", False), ("qwen3_moe_mixed", False)],
)
def test_load_then_save_is_bit_identical(name, copy_head, tmp_path):
    tensors = write_checkpoint(tmp_path / "in", name, copy_head=copy_head)
    model = loading.load(tmp_path / "in")
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {np.dtype("float32")}
    saving.save(model, families.read_config(tmp_path / "in"), tmp_path / "out")
    actual = load_file(tmp_path / "out" / "model.safetensors")
    assert set(actual) == set(tensors)
    for tensor, array in tensors.items():
        assert actual[tensor].dtype == array.dtype
        assert actual[tensor].tobytes() == array.tobytes(), tensor
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    assert raw["torch_dtype"] == "bfloat16"


def test_save_in_a_chosen_dtype(tmp_path):
    config = families.config_from_hf(RAW["llama"])
    saving.save(build.init(config, 0), config, tmp_path, dtype="bfloat16")
    actual = load_file(tmp_path / "model.safetensors")
    assert {array.dtype for array in actual.values()} == {np.dtype(ml_dtypes.bfloat16)}


@pytest.mark.slow
def test_what_is_wide_stays_wide(tmp_path):
    """A bias that moves the choice of experts: steps of a bfloat16 near 5 are 0.03."""
    config = families.config_from_hf({**SIZES, **EXPERTS["glm4_moe"]})
    model = build.init(config, 0)
    bias = model.stack.block.mlp.router.choice_bias
    bias[...] = bias[...] + 5.001
    saving.save(model, config, tmp_path, dtype="bfloat16")
    actual = load_file(tmp_path / "model.safetensors")
    wide = {name: array for name, array in actual.items() if array.dtype == np.float32}
    assert {name.split(".", 3)[3] for name in wide} == {"mlp.gate.e_score_correction_bias"}
    assert len(wide) == 2 and all((array == np.float32(5.001)).all() for array in wide.values())
    low = loading.load(tmp_path, param_dtype="bfloat16")
    assert (low.stack.block.mlp.router.choice_bias[...] == np.float32(5.001)).all()


@pytest.mark.slow
@pytest.mark.parametrize("sizes", MESHES[:2], ids=str)
def test_sharded_load_init_save_equal_one_device(sizes, tmp_path):
    name = "qwen3_yarn"
    tensors = write_checkpoint(tmp_path / "in", name)
    config = families.read_config(tmp_path / "in")
    mesh = make_mesh(**sizes)
    for make in (
        lambda mesh: loading.load(tmp_path / "in", mesh=mesh),
        lambda mesh: build.init(config, 5, mesh=mesh),
    ):
        entry, many = make(None), make(mesh)
        for a, b in zip(*(jax.tree.leaves(nnx.state(m)) for m in (entry, many)), strict=True):
            np.testing.assert_array_equal(a, b)
            assert b.sharding.mesh == mesh
    kernel = many.stack.block.mlp.up.kernel[...]
    ways = sizes.get("fsdp", 1) * sizes.get("tensor", 1)
    assert kernel.addressable_shards[0].data.size * ways == kernel.size
    saving.save(loading.load(tmp_path / "in", mesh=mesh), config, tmp_path / "out")
    actual = load_file(tmp_path / "out" / "model.safetensors")
    assert all(actual[n].tobytes() == array.tobytes() for n, array in tensors.items())


def test_parameters_drawn_one_by_one_are_those_of_the_whole_model():
    """Draw one of each kind on a mesh, kernels layer by layer."""
    config, mesh = families.config_from_hf(RAW["qwen3"]), make_mesh(fsdp=2, tensor=2)
    expected, _ = split_model(build.init(config, 5, mesh=mesh))
    kernels = {"stack.block.attention.q.kernel", "stack.block.mlp.down.kernel"}
    chosen = {*kernels, "embed.embedding", "stack.block.mlp_norm.scale"}
    for path, value in build.draw_params(config, 5, mesh, only=chosen, by_layer=kernels):
        chosen.remove(path)
        reference = expected[path]
        if path in kernels:
            layers = list(value)
            assert all(layer.sharding.mesh == mesh for layer in layers)
            value = np.stack(layers)
        else:
            assert value.sharding == reference.sharding
        np.testing.assert_array_equal(value, reference, err_msg=path)
    assert not chosen
    every = (path for path, _ in build.draw_params(config, 5, by_layer=expected))
    assert set(every) == expected.keys()


@pytest.mark.parametrize(
    "name, path",
    [("qwen3_5", "stack.linear.attention.A_log"), ("nemotron_h", "stack.mamba.layer.dt_bias")],
)
def test_functions_of_what_is_drawn_are_rounded_alike(name, path):
    config = families.config_from_hf({**SIZES, **RAW[name]})
    expected = split_model(build.init(config, 5))[0][path]
    ((_, value),) = build.draw_params(config, 5, only={path})
    np.testing.assert_array_equal(value, expected)


@pytest.mark.parametrize("shape", [(3, 5), (0, 4)])
def test_a_layer_gets_an_array_of_jax_outside_of_a_program(shape):
    """Layers of families from outside may call its methods."""

    def draw(key):
        init = LayerInit(nnx.Rngs(params=key), 0.1, jnp.bfloat16)
        return init.normal(shape).at[0:1].set(2.0)

    key = jax.random.key(3)
    np.testing.assert_array_equal(draw(key), jax.jit(draw)(key))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, dtype",
    [("qwen3_moe", "bfloat16"), ("qwen3_5", "float32"), ("nemotron_h_moe", "float32")],
)
def test_small_models_have_the_bits_of_large_ones(name, dtype, monkeypatch):
    """Those are drawn by a program of their own."""
    config = families.config_from_hf({**SIZES, **RAW[name]})
    small = split_model(build.init(config, 5, param_dtype=dtype))[0]
    monkeypatch.setattr(build, "SMALL_MODEL", 0)
    large = split_model(build.init(config, 5, param_dtype=dtype))[0]
    assert small.keys() == large.keys()
    for path, value in small.items():
        assert value.dtype == large[path].dtype
        np.testing.assert_array_equal(value, large[path], err_msg=path)


def value_and_grads(mesh, name="qwen3"):
    config = families.config_from_hf(RAW[name])
    batch = pack([documents(row, 9, 14) for row in range(4)], 24)
    graphdef, state = nnx.split(build.init(config, 0, mesh=mesh))

    def loss(state, batch):
        model = nnx.merge(graphdef, state)
        return (model.logits(model.hidden(batch).hidden) ** 2).mean()

    return jax.jit(jax.value_and_grad(loss))(state, batch)


@pytest.fixture(scope="module")
def one_device():
    return value_and_grads(None)


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param(MESHES[0], marks=pytest.mark.thorough),
        MESHES[1],
        pytest.param(MESHES[2], marks=pytest.mark.thorough),
        pytest.param(MESHES[3], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_sharded_gradients_equal_one_device(sizes, one_device):
    value, grads = one_device
    mesh = make_mesh(**sizes)
    with jax.set_mesh(mesh):
        actual, found_grads = value_and_grads(mesh)
    # float32 sums split over devices.
    np.testing.assert_allclose(actual, value, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(found_grads), jax.tree.leaves(grads), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5 * float(np.abs(b).max()))


def spoil(tensors):
    tensors.pop("model.norm.weight")
    tensors["model.embed_tokens.weight"] = np.zeros((3, 3), np.float32)
    tensors["visual.weight"] = np.zeros(2, np.float32)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = np.zeros(tensors[name].shape, np.uint8)


@pytest.mark.parametrize(
    "read",
    [loading.load, lambda folder: loading.check_folder(folder, families.read_config(folder))],
)
def test_all_misfits_in_one_message(read, tmp_path):
    tensors = write_checkpoint(tmp_path, "qwen2")
    spoil(tensors)
    (tmp_path / "model.safetensors.index.json").unlink()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError) as caught:
        read(tmp_path)
    message = str(caught.value)
    assert "missing model.norm.weight" in message
    assert "unexpected visual.weight" in message
    assert "up_proj.weight is stored as uint8" in message
    assert "model.safetensors: model.embed_tokens.weight is (3, 3)" in message


def test_a_tied_head_that_differs_is_refused(tmp_path):
    tensors = write_checkpoint(tmp_path, "qwen3", copy_head=True)
    tensors["lm_head.weight"] = tensors["lm_head.weight"] + np.ones((), ml_dtypes.bfloat16)
    (tmp_path / "model.safetensors.index.json").unlink()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="lm_head.weight differs from the embedding"):
        loading.load(tmp_path)


@pytest.mark.parametrize(
    "small, model",
    [(2**22, 0), (0, 2**22), (0, 0)],
    ids=["small arrays by numpy", "a small model by numpy", "by the devices"],
)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_no_numbers_are_named(tmp_path, monkeypatch, value, small, model):
    monkeypatch.setattr(finite, "SMALL", small)
    monkeypatch.setattr(finite, "SMALL_MODEL", model)
    if small or model:
        monkeypatch.setattr(finite, "_is_finite", None)  # no program
    tensors = write_checkpoint(tmp_path, "qwen2")
    name = "model.layers.1.self_attn.k_proj.bias"
    tensors[name][3] = value
    (tmp_path / "model.safetensors.index.json").unlink()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=rf"{name}.* holds 1 value .* first {value} at \[3\]"):
        loading.load(tmp_path, make_mesh(fsdp=2, tensor=2))
    tensors[name][3] = 1e30  # finite in bfloat16
    save_file(tensors, tmp_path / "model.safetensors")
    loading.load(tmp_path)
    with pytest.raises(UserError, match=f"{name}.*that float16 cannot"):
        loading.load(tmp_path, param_dtype="float16")


def test_a_folder_without_config_is_refused(tmp_path):
    with pytest.raises(UserError, match="config.json does not exist"):
        loading.load(tmp_path)


def test_key_experts_chooses_their_backend():
    """model.experts reaches every mixture, as model.attention its layers."""
    options = model_options(ModelConfig(experts="triton"))
    model = build.abstract(families.config_from_hf(RAW["qwen3_moe_mixed"]), **options)
    actual = {node.impl for _, node in nnx.iter_graph(model) if isinstance(node, MoE)}
    assert actual == {"triton"}


@pytest.mark.parametrize("key", ["attention", "logp", "experts"])
def test_a_backend_that_its_op_does_not_have_is_refused(key):
    with pytest.raises(UserError, match=f"model.{key} 'nosuch' is no backend; choose one of auto"):
        check_backends(ModelConfig(path="some/model", **{key: "nosuch"}))
    check_backends(ModelConfig(path="some/model", **{key: "xla"}))
