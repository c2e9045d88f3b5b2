"""Folders in MXFP4: the numbers of transformers, whatever is read of them and wherever it lies;
exports without the packing; storage of the same numbers beside an adapter."""

import json
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_models import SIZES, documents, pack

from jaxtrain.adapters.attach import attach
from jaxtrain.adapters.mxfp4 import dequantize_mxfp4, quantize_mxfp4
from jaxtrain.adapters.spec import Adapter, LoRASpec, choose_slots, find_linears
from jaxtrain.adapters.storage import count_weights, find_stored, quantize_params
from jaxtrain.errors import UserError
from jaxtrain.huggingface import packed
from jaxtrain.huggingface.compressed import E2M1
from jaxtrain.huggingface.copy import copy_folder
from jaxtrain.huggingface.packed import open_folder
from jaxtrain.models import build, families, loading, saving
from jaxtrain.models.parameters import split_model

RAW = {
    **SIZES,
    "model_type": "gpt_oss",
    "hidden_size": 64,
    "intermediate_size": 32,
    "head_dim": 16,
    "num_hidden_layers": 4,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
    "sliding_window": 7,
    "router_aux_loss_coef": 0.9,
}
# As the makers' config.json has them.
MORE = {"experts_per_token": 2, "initial_context_length": 4096}
PACKING = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.embed_tokens", "lm_head"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folder in gpt-oss's published layout: blocks in one shard, their scales in another."""
    folder = tmp_path_factory.mktemp("mxfp4")
    config, rng = families.config_from_hf(RAW), np.random.default_rng(0)
    saving.save(build.init(config, seed=1), config, folder, "bfloat16")
    plain, extra = load_file(folder / "model.safetensors"), {}
    tensors = {name: array.astype(ml_dtypes.bfloat16) for name, array in plain.items()}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        tensors[f"{name}_blocks"] = rng.integers(0, 256, (*shape, 16), dtype=np.uint8)
        extra[f"{name}_scales"] = rng.integers(116, 128, shape, dtype=np.uint8)
    (folder / "model.safetensors").unlink()
    shards = {
        "model-00001-of-00002.safetensors": tensors,
        "model-00002-of-00002.safetensors": extra,
    }
    for file, held in shards.items():
        save_file(held, folder / file)
    index = {"weight_map": {name: file for file, held in shards.items() for name in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    raw = json.loads((folder / "config.json").read_text())
    text = json.dumps({**raw, **MORE, "quantization_config": PACKING})
    (folder / "config.json").write_text(text)
    return folder


def by_transformers(folder) -> dict[str, np.ndarray]:
    torch = pytest.importorskip("torch")
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    stored = {}
    for file in folder.glob("*.safetensors"):
        stored |= load_file(file)
    names = [name.removesuffix("_blocks") for name in stored if name.endswith("_blocks")]
    parts = {n: [torch.from_numpy(stored[f"{n}_{p}"]) for p in ("blocks", "scales")] for n in names}
    return {n: convert_moe_packed_tensors(*two).float().numpy() for n, two in parts.items()}


@pytest.mark.parametrize("scales", ["middle", "any"])
def test_any_part_of_a_tensor_is_what_transformers_reads(folder, scales, monkeypatch):
    if scales == "any":  # as far from 127 as they come, where bits cannot be moved
        monkeypatch.setattr(packed, "MIDDLE_SCALES", (128, 127))
    files, expected = open_folder(folder), by_transformers(folder)
    assert len(expected) == 8 and not any(n.endswith(("_blocks", "_scales")) for n in files.tensors)
    for name, array in expected.items():
        E, inputs, outputs = files.tensors[name].shape
        for index in (
            (slice(0, E), slice(0, inputs), slice(0, outputs)),
            (slice(1, 3), slice(0, inputs), slice(1, outputs, 2)),  # up alone
            (slice(0, 1), slice(5, 29), slice(3, 4)),  # inside of a block
        ):
            actual = files.fetch(name, index)
            assert actual.dtype == ml_dtypes.bfloat16
            np.testing.assert_array_equal(actual.astype(np.float32), array[index])


def test_exports_are_plain(folder, tmp_path):
    model, expected = loading.load(folder), by_transformers(folder)
    config = families.read_config(folder)
    saving.save(model, config, tmp_path / "saved")
    copy_folder(folder, tmp_path / "copied")
    plain = load_file(tmp_path / "saved" / "model.safetensors")
    for output in ("saved", "copied"):
        written = json.loads((tmp_path / output / "config.json").read_text())
        assert "quantization_config" not in written
        assert families.read_config(tmp_path / output) == config
        tensors = load_file(tmp_path / output / "model.safetensors")
        assert {t.dtype for t in tensors.values()} == {np.dtype(ml_dtypes.bfloat16)}
        assert tensors.keys() == plain.keys() and expected.keys() < plain.keys()
        for name, array in tensors.items():
            np.testing.assert_array_equal(array, plain[name], err_msg=name)
            if name in expected:
                np.testing.assert_array_equal(array.astype(np.float32), expected[name])


def test_what_does_not_fit_is_refused(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "bad")
    shard = tmp_path / "bad" / "model-00002-of-00002.safetensors"
    held = load_file(shard)
    name = next(iter(held))
    save_file({**held, name: held[name][:, :-1].copy()}, shard)
    with pytest.raises(UserError, match="no MXFP4 weights"):
        loading.load(tmp_path / "bad")
    raw = json.loads((folder / "config.json").read_text())
    for change, words in (
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq.* not supported.*mxfp4"),
        ({"experts_per_token": 3}, "two names of one number"),
        ({"initial_context_length": 2048}, "initial_context_length=2048"),
        ({"hidden_act": "gelu"}, "silu alone"),
    ):
        with pytest.raises(UserError, match=words):
            families.config_from_hf({**raw, **change})


def test_storage_is_that_of_the_definition():
    """Every code at every scale comes back; other numbers go to the nearest."""
    codes = np.tile(np.arange(16, dtype=np.uint8), (254, 2))  # a block holds each code twice
    scales = np.arange(1, 255, dtype=np.uint8)[:, None]
    codes_of = jnp.asarray(codes[:, 1::2] << 4 | codes[:, ::2])
    exact = E2M1[codes] * np.exp2(scales - 127.0)  # float64
    parts = {"blocks": codes_of.T, "scales": jnp.asarray(scales).T}  # inputs first
    kernel = dequantize_mxfp4(parts, jnp.float32)
    fits = (np.abs(exact) < 2.0**127).all(1) & (scales[:, 0] > 1)  # no float32 is denormal here
    np.testing.assert_array_equal(np.asarray(kernel).T[fits], exact[fits])
    again = quantize_mxfp4(kernel[:, 3:250])
    np.testing.assert_array_equal(again["blocks"], codes_of.T[:, 3:250])
    np.testing.assert_array_equal(again["scales"], scales.T[:, 3:250])

    subset = np.random.default_rng(0).standard_normal((96, 5)).astype(np.float32)
    subset[:32, 1] = 0
    array = np.asarray(dequantize_mxfp4(quantize_mxfp4(jnp.asarray(subset)), jnp.float32))
    for (index, column), value in np.ndenumerate(subset):
        block = subset[index // 32 * 32 : index // 32 * 32 + 32, column]
        largest = np.abs(block).max()
        levels = E2M1 * (2.0 ** (np.floor(np.log2(largest)) - 2) if largest else 1)
        assert abs(array[index, column] - value) == np.abs(levels - value).min()
    with pytest.raises(UserError, match="this model has none"):
        config = families.config_from_hf({**SIZES, "model_type": "llama"})
        attach(build.abstract(config), Adapter({}, quantize="mxfp4"))


@pytest.mark.slow
def test_a_base_is_kept_as_it_is_stored(folder):
    """Logits match those without packed storage, and memory holds the folder's bytes."""
    config = families.read_config(folder)
    slots = choose_slots(find_linears(config), ["attention"], LoRASpec(2, 4.0), {}, {})
    options = {"param_dtype": "bfloat16", "dtype": "float32"}
    model = attach(build.abstract(config, **options), Adapter(slots, quantize="mxfp4"))
    shapes, rebuild = split_model(model)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes = {
        path: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device) for path, x in shapes.items()
    }
    by_layer = find_stored(shapes, "mxfp4")
    assert {path.split(".")[-2] for path in by_layer} == {"gate", "up", "down"}
    source = open_folder(folder), loading.stored_entries(config)
    params, rounded = (
        quantize_params(
            loading.read_params(folder, by_layer=by_layer, **options), shapes, "mxfp4", *where
        )
        for where in ([source], [])
    )
    assert params.keys() == rounded.keys()
    for path, value in params.items():  # as it is, and decoded and stored again
        np.testing.assert_array_equal(value, rounded[path], err_msg=path)
    raw = {}
    for file in folder.glob("*.safetensors"):
        raw |= load_file(file)
    stored = raw["model.layers.1.mlp.experts.down_proj_blocks"]
    retained = params["stack.block.mlp.experts.down.kernel.blocks"][1]
    np.testing.assert_array_equal(
        retained.swapaxes(1, 2), stored.reshape(*stored.shape[:2], -1), err_msg="inputs first"
    )
    scales = params["stack.block.mlp.experts.down.kernel.scales"][1].swapaxes(1, 2)
    np.testing.assert_array_equal(scales, raw["model.layers.1.mlp.experts.down_proj_scales"])
    weights = sum(count_weights(path, value) for path, value in params.items() if "experts" in path)
    assert weights == 4 * 3 * (3 * 64 * 32 + 2 * 32 + 64), "matrices and biases"

    rows = pack([[row] for row in documents(4, 30, 30)], 30)
    plain = loading.load(folder, **options)
    expected = jax.jit(lambda m: m.logits(m.hidden(rows).hidden))(plain)
    for path in slots:  # as LoRA begins
        for name in ("a", "b"):
            shape = shapes[f"{path}.adapter.{name}"]
            params[f"{path}.adapter.{name}"] = jnp.zeros(shape.shape, shape.dtype)

    actual = jax.jit(lambda p: (m := rebuild(p)).logits(m.hidden(rows).hidden))(params)
    np.testing.assert_array_equal(actual, expected)
