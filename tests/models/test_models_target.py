"""A target run for its states: with an adapter, in few bits, on any devices; its ends alone."""

import jax
import numpy as np
import pytest
from tiny_models import RAW, documents, pack

from jaxtrain.adapters.merge import merge_adapter
from jaxtrain.adapters.peft import read_adapter, write_peft
from jaxtrain.adapters.spec import Adapter, LoRASpec, choose_slots, find_linears
from jaxtrain.core.bundle import ModelBundle
from jaxtrain.core.weights import abstract_params, open_params
from jaxtrain.distributed.mesh import make_mesh
from jaxtrain.huggingface.packed import fingerprint
from jaxtrain.methods.drafts.capture import FrozenTarget, pad_rows
from jaxtrain.methods.drafts.draft_model import borrowed_parts
from jaxtrain.methods.drafts.target_states import LAST, STATES
from jaxtrain.models import build, families, loading, saving
from jaxtrain.models.parameters import split_model

LAYERS = (1, 0)
ROWS = [documents(0, 9, 6), documents(1, 14), documents(2, 3, 3, 5)]
TOKENS = 16


def host_batch():
    batch = jax.tree.map(np.asarray, pack(ROWS, TOKENS))
    return jax.tree.map(lambda x: x[None], batch)


def parts_of(config, folder=None, adapter=None, devices=slice(0, 1), **axes) -> ModelBundle:
    mesh = make_mesh(jax.devices()[devices], **{"fsdp": -1, **axes})
    return ModelBundle(None, config, mesh, folder, {"dtype": "float32"}, adapter)


def states_of(bundle: ModelBundle, **kwargs) -> dict[str, np.ndarray]:
    actual = FrozenTarget(bundle, LAYERS, **{"last": True, "seed": 0, **kwargs})(host_batch())
    real = (pack(ROWS, TOKENS).until > np.arange(TOKENS) + 1)[None, ..., None]
    return {n: np.where(real, np.asarray(v)[:, : len(ROWS)], 0) for n, v in actual.items()}


@pytest.fixture(scope="module")
def plain():
    """States of a model on one device, by its own forward pass."""
    config = families.config_from_hf({**RAW["qwen3_moe"], "vocab_size": 96})
    model, batch = build.init(config, 0), pack(ROWS, TOKENS)
    actual = jax.jit(lambda batch: model.hidden(batch, LAYERS))(batch)
    real = (batch.until > np.arange(TOKENS) + 1)[..., None]
    captured = np.concatenate([actual.captured[layer] for layer in LAYERS], -1)
    return config, {
        STATES: np.where(real, captured, 0)[None],
        LAST: np.where(real, actual.hidden, 0)[None],
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "placed",
    [
        {"devices": slice(2, 4), "fsdp": 1, "expert": 2},
        pytest.param({}, marks=pytest.mark.thorough),
        pytest.param({"devices": slice(2, 4)}, marks=pytest.mark.thorough),
        pytest.param({"devices": slice(0, 4), "tensor": 2}, marks=pytest.mark.thorough),
    ],
)
def test_states_are_those_of_the_forward_pass_on_any_devices(plain, placed):
    """Three rows do not divide among two devices; experts, too."""
    config, expected = plain
    parts = parts_of(config, **placed)
    actual = states_of(parts)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        # float32, sums in another order.
        np.testing.assert_allclose(actual[name], value, atol=3e-6, err_msg=name)
    assert states_of(parts, last=False).keys() == {STATES}


def test_empty_rows_are_padding():
    batch = host_batch()._replace(owner=np.zeros((1, 3, TOKENS), np.int32))
    padded = pad_rows(batch, 2)
    assert padded.tokens.shape == (1, 4, TOKENS) and pad_rows(batch, 3) is batch
    np.testing.assert_array_equal(padded.until[0, 3], np.arange(1, TOKENS + 1))
    assert (padded.prev[0, 3] == -1).all() and (padded.owner[0, 3] == -1).all()
    np.testing.assert_array_equal(padded.tokens[:, :3], batch.tokens)


def write_base(folder, **raw):
    config = families.config_from_hf({**RAW["qwen3"], "tie_word_embeddings": False, **raw})
    saving.save(build.init(config, 3), config, folder)
    return families.read_config(folder)


def write_adapter(folder, config, full=()):
    slots = choose_slots(find_linears(config), ["all-linear"], LoRASpec(4, 8.0), {}, {})
    adapter = Adapter(slots, full)
    parts = parts_of(config, adapter=adapter)
    shapes, rng = abstract_params(parts)[0], np.random.default_rng(0)
    values = {
        path: 0.1 * rng.standard_normal(shape.shape).astype(np.float32)
        for path, shape in sorted(shapes.items())
        if adapter.trains(path)
    }
    write_peft(values, config, adapter, folder, None)


@pytest.mark.slow
def test_a_target_with_an_adapter_is_the_merged_model(tmp_path):
    config = write_base(tmp_path / "base")
    write_adapter(tmp_path / "adapter", config, full=("lm_head.embedding",))
    merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    adapter = read_adapter(tmp_path / "adapter", config, "float32")
    attached = parts_of(config, tmp_path / "base", adapter)
    merged = parts_of(config, tmp_path / "merged")
    actual, expected = states_of(attached), states_of(merged)
    for name, value in expected.items():
        # float32: W x + s B (A x) against (W + s B A) x.
        np.testing.assert_allclose(actual[name], value, atol=2e-5, err_msg=name)
    assert (
        np.abs(expected[STATES] - states_of(parts_of(config, tmp_path / "base"))[STATES]).max() > 1
    )
    ends = open_params(borrowed_parts(attached), 0)
    params = open_params(borrowed_parts(merged), 0)
    assert ends.keys() == params.keys() == {"embed.embedding", "norm.scale", "lm_head.embedding"}
    for path, value in params.items():
        np.testing.assert_allclose(ends[path], value, atol=1e-6, err_msg=path)


@pytest.mark.slow
def test_a_target_in_few_bits_is_near_the_whole_one(tmp_path):
    config = write_base(tmp_path / "base")
    full = states_of(parts_of(config, tmp_path / "base"))
    few = states_of(parts_of(config, tmp_path / "base", Adapter({}, quantize="int8")))
    for name, value in full.items():
        error = np.abs(few[name] - value).max() / np.abs(value).max()
        assert 0 < error < 0.05, name


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_ends_are_those_of_the_whole_model(tmp_path, tied):
    config = write_base(tmp_path / "base", tie_word_embeddings=tied)
    for folder in (tmp_path / "base", None):
        parts = parts_of(config, folder)
        complete, ends = open_params(parts, 3), open_params(borrowed_parts(parts), 3)
        assert len(ends) == 2 + (not tied)
        for path, value in ends.items():
            np.testing.assert_array_equal(value, complete[path], err_msg=path)
        model = abstract_params(borrowed_parts(parts))[1](ends)
        full = abstract_params(parts)[1](complete)
        x = np.random.default_rng(0).standard_normal((2, 3, 32)).astype(np.float32)
        np.testing.assert_array_equal(model.logits(model.norm(x)), full.logits(full.norm(x)))


def test_a_fingerprint_knows_one_changed_tensor(tmp_path):
    config = write_base(tmp_path / "base")
    first = fingerprint(tmp_path / "base")
    model = loading.load(tmp_path / "base")
    params, rebuild = split_model(model)
    saving.save(rebuild(params), config, tmp_path / "same")
    assert fingerprint(tmp_path / "same") == first
    path = "stack.block.mlp.up.kernel"
    changed = {**params, path: params[path].at[-1].multiply(1.001)}
    saving.save(rebuild(changed), config, tmp_path / "other")
    assert fingerprint(tmp_path / "other") != first
