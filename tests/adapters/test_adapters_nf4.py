"""NF4 and int8: the published numbers, independent round trips, models that compute with them."""

import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import RAW, compute_logits, documents, pack

from jaxtrain.adapters import nf4
from jaxtrain.adapters.attach import attach
from jaxtrain.adapters.int8 import dequantize_int8, quantize_int8
from jaxtrain.adapters.merge import merge_adapter
from jaxtrain.adapters.peft import write_peft
from jaxtrain.adapters.spec import Adapter, LoRASpec, choose_slots, find_linears
from jaxtrain.adapters.storage import STORAGES, count_weights, quantize_params
from jaxtrain.core.weights import split_trained
from jaxtrain.distributed.mesh import make_mesh
from jaxtrain.errors import UserError
from jaxtrain.models import build, families, loading, saving
from jaxtrain.models.parameters import split_model

SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}


def test_thresholds_lie_between_the_levels():
    np.testing.assert_allclose(nf4.THRESHOLDS, (nf4.LEVELS[1:] + nf4.LEVELS[:-1]) / 2, atol=1e-7)


def test_the_dynamic_map_is_that_of_bitsandbytes():
    assert nf4.DYNAMIC.shape == (256,) and len(set(nf4.DYNAMIC)) == 256
    assert nf4.DYNAMIC[-1] == 1 and 0 in nf4.DYNAMIC and -1 not in nf4.DYNAMIC
    assert nf4.DYNAMIC[0] == -nf4.DYNAMIC[-2] == pytest.approx(-0.99296875)
    assert nf4.DYNAMIC[128] == pytest.approx(5.5e-7), "the smallest above zero"
    # Of bitsandbytes 0.50.2's create_dynamic_map(), to the last bit.
    assert zlib.crc32(nf4.DYNAMIC.tobytes()) == 0x1B137AEB


def one_row(values):
    """Codes of a row of 64 values, by way of a kernel [64, 1]."""
    nibbles = np.asarray(nf4.quantize_nf4(jnp.asarray(values, jnp.float32)[:, None])["nibbles"])
    return np.stack([nibbles[0] >> 4, nibbles[0] & 15], axis=-1).reshape(-1)


@pytest.mark.slow
def test_a_tie_goes_down_and_zeros_stay_zero():
    row = np.zeros(64, np.float32)
    row[0] = 1.0
    row[1:16] = nf4.THRESHOLDS
    row[16:31] = np.nextafter(nf4.THRESHOLDS, np.float32(2))
    codes = one_row(row)
    assert codes[0] == 15
    np.testing.assert_array_equal(codes[1:16], np.arange(15))
    np.testing.assert_array_equal(codes[16:31], np.arange(1, 16))
    assert set(one_row(np.zeros(64))) == {7}
    kernel = nf4.dequantize_nf4(nf4.quantize_nf4(jnp.zeros((64, 3))), jnp.float32)
    np.testing.assert_array_equal(kernel, np.zeros((64, 3)))


def plain_round_trip(weight):
    """The definition, in numpy loops: flat row-major blocks, nearest of each table by distance."""
    flat = weight.astype(np.float32).reshape(-1)
    absmax = np.array([np.abs(flat[i : i + 64]).max() for i in range(0, flat.size, 64)], np.float32)
    offset = absmax.mean(dtype=np.float32)
    restored = np.empty_like(absmax)
    for start in range(0, absmax.size, 256):
        part = absmax[start : start + 256] - offset
        scale = np.abs(part).max()
        nearest = np.abs(part[:, None] / scale - nf4.DYNAMIC).argmin(1)
        restored[start : start + 256] = nf4.DYNAMIC[nearest] * scale + offset
    out = np.empty_like(flat)
    for i, top in enumerate(absmax):
        part = flat[64 * i : 64 * i + 64] / top
        nearest = np.abs(part[:, None] - nf4.LEVELS).argmin(1)
        out[64 * i : 64 * i + 64] = nf4.LEVELS[nearest] * restored[i]
    return out.reshape(weight.shape), absmax, restored


def test_round_trip_equals_the_definition():
    weight = np.random.default_rng(0).standard_normal((96, 192)).astype(np.float32)
    expected, absmax, restored = plain_round_trip(weight)
    parts = nf4.quantize_nf4(jnp.asarray(weight.T))
    actual_values = np.asarray(nf4.dequantize_nf4(parts, jnp.float32)).T
    # One rounding more or less in absmax; a code that differs would be off by a tenth.
    np.testing.assert_allclose(actual_values, expected, rtol=1e-5, atol=1e-6)
    # Half the widest gap between levels, and what double quantization adds to the scale.
    bound = 0.152 * absmax + np.abs(restored - absmax)
    error = np.abs(actual_values - weight).reshape(-1, 64).max(1)
    assert (error <= bound + 1e-6).all() and error.max() > 0.05
    # Half the widest gap between the outer levels, of the largest distance from the mean.
    assert np.abs(restored - absmax).max() <= 0.008 * np.abs(absmax - absmax.mean()).max()
    again = nf4.quantize_nf4(nf4.dequantize_nf4(parts, jnp.float32))
    np.testing.assert_array_equal(again["nibbles"], parts["nibbles"])
    shapes = nf4.nf4_shapes((192, 96))
    assert {k: (v.shape, v.dtype) for k, v in shapes.items()} == {
        k: (v.shape, v.dtype) for k, v in parts.items()
    }


def quantized_model(tmp_path, kind):
    """(config, adapter, trained, quantized frozen, rebuild) on a folder tmp_path / base."""
    config = families.config_from_hf({**RAW["qwen3"], **SIZES})
    saving.save(build.init(config, seed=3), config, tmp_path / "base")
    config = families.read_config(tmp_path / "base")
    slots = choose_slots(find_linears(config), ["attention"], LoRASpec(4, 8.0), {}, {})
    adapter = Adapter(slots, quantize=kind)
    shapes, rebuild = split_model(attach(build.abstract(config), adapter))
    mesh = make_mesh(jax.devices()[:1])
    named_sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    shapes = {
        path: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=named_sharding)
        for path, s in shapes.items()
    }
    frozen = quantize_params(loading.read_params(tmp_path / "base"), shapes, kind)
    trained, _ = split_trained(shapes, adapter)
    rng = np.random.default_rng(0)
    trained = {
        path: jnp.asarray(0.2 * rng.standard_normal(s.shape), jnp.float32)
        for path, s in trained.items()
    }
    assert {**trained, **frozen}.keys() == shapes.keys()
    return config, adapter, trained, frozen, rebuild


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_quantized_model_is_its_merged_folder(kind, tmp_path):
    config, adapter, trained, frozen, rebuild = quantized_model(tmp_path, kind)
    write_peft(trained, config, adapter, tmp_path / "adapter", None)
    merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "out", quantize=kind)
    merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "plain")
    batch = pack([[row] for row in documents(4, 30, 30)], 30)

    def logits(model):
        return np.asarray(compute_logits(model, batch))

    actual_values = logits(rebuild({**frozen, **trained}))
    scale = np.abs(actual_values).max()
    # fp32 sums in another order; without the round trip the quantization's error shows.
    assert np.abs(logits(loading.load(tmp_path / "out")) - actual_values).max() < 1e-4 * scale
    assert np.abs(logits(loading.load(tmp_path / "plain")) - actual_values).max() > 1e-3 * scale


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "bits"),
    [("nf4", (4.1, 4.3)), pytest.param("int8", (8.0, 8.5), marks=pytest.mark.thorough)],
)
def test_gradients_pass_through_and_weights_are_counted(kind, bits, tmp_path):
    config, adapter, trained, frozen, rebuild = quantized_model(tmp_path, kind)
    batch = pack([[row] for row in documents(4, 30, 30)], 30)
    dense = dict(frozen)
    for path in find_linears(config):
        names = STORAGES[kind].shapes((64, 64))
        parts = {name: dense.pop(f"{path}.kernel.{name}") for name in names}
        dense[f"{path}.kernel"] = STORAGES[kind].dequantize(parts, jnp.float32)
    _, rebuild_dense = split_model(attach(build.abstract(config), Adapter(adapter.slots)))

    def grads(rebuild, base):
        def loss(trained):
            model = rebuild({**base, **trained})
            return jnp.sin(model.logits(model.hidden(batch).hidden)).mean()

        return jax.jit(jax.grad(loss))(trained)

    actual_values, expected = grads(rebuild, frozen), grads(rebuild_dense, dense)
    for path, grad in expected.items():
        assert np.abs(actual_values[path] - grad).max() < 1e-4 * np.abs(grad).max() + 1e-9, path
    counted = sum(count_weights(path, value) for path, value in frozen.items())
    assert counted == build.param_count(config)
    kernels = [v for path, v in frozen.items() if ".kernel." in path]
    rest = sum(value.size for path, value in frozen.items() if ".kernel." not in path)
    assert bits[0] < 8 * sum(v.nbytes for v in kernels) / (counted - rest) < bits[1]


def test_an_odd_width_is_refused():
    config = families.config_from_hf(RAW["qwen3"])
    with pytest.raises(UserError, match="multiples of 64"):
        attach(build.abstract(config), Adapter({}, quantize="nf4"))


def test_int8_rounds_to_the_nearest_of_each_output():
    kernel = np.random.default_rng(0).standard_normal((40, 7)).astype(np.float32)
    kernel[:, 3] = 0
    parts = quantize_int8(jnp.asarray(kernel))
    restored = np.asarray(dequantize_int8(parts, jnp.float32))
    step = np.abs(kernel).max(0) / 127
    assert (np.abs(restored - kernel) <= 0.5001 * step).all()
    assert (
        np.abs(np.asarray(parts["codes"]).astype(int)).max(0).tolist()
        == [127] * 3 + [0] + [127] * 3
    )
