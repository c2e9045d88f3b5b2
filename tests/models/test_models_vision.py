"""Models that read images against transformers in torch: logits and all gradients of packed rows
with several images, whose branches torch reads alone; folders; what each part adds."""

import copy
import dataclasses
import functools
import json
import re

import numpy as np
import pytest

pytest.importorskip("torch", reason="parity needs torch, which this environment has not")

import jax
import jax.numpy as jnp
import torch
import transformers
from flax import nnx
from test_models_families import leaves, make_torch, read_flat, relative_error
from tiny_vision import VISION, draw_images, make_batch, merge_of, pack_images, processed

from jaxtrain.batch import IMAGE_SLOT
from jaxtrain.cli.quantize import choose_matrices
from jaxtrain.distributed.feed import feed
from jaxtrain.distributed.mesh import make_mesh
from jaxtrain.distributed.sharding import shardings
from jaxtrain.errors import UserError
from jaxtrain.models import build, families, loading, saving
from jaxtrain.models.qwen2_5_vl import order_windows


@functools.cache
def reference(name):
    """The model of transformers."""
    return make_torch(VISION[name])


def run(model, batch, probe):
    """Return (logits, gradients by path) of a random linear function of the logits."""
    graphdef, state = nnx.split(model)

    def loss(state):
        model = nnx.merge(graphdef, state)
        logits = model.logits(model.hidden(batch).hidden)
        return (logits * probe).sum() / probe.size, logits

    (_, logits), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(state)
    return np.asarray(logits), leaves(grads)


@pytest.mark.slow
@pytest.mark.parametrize("name", VISION)
def test_it_computes_and_stores_what_transformers_does(name, tmp_path):
    theirs = reference(name)
    theirs.save_pretrained(tmp_path / "theirs")
    config = families.read_config(tmp_path / "theirs")
    model = loading.load(tmp_path / "theirs")

    saving.save(model, config, tmp_path / "ours")
    expected, actual = read_flat(tmp_path / "theirs"), read_flat(tmp_path / "ours")
    assert expected.keys() == actual.keys()
    for tensor, array in expected.items():
        assert actual[tensor].tobytes() == array.tobytes(), tensor
    assert families.read_config(tmp_path / "ours") == config
    before, after = (
        transformers.AutoConfig.from_pretrained(tmp_path / side).to_dict()
        for side in ("theirs", "ours")
    )
    ignored = ("_name_or_path", "transformers_version", "dtype", "architectures")
    for key in before.keys() - {*ignored, "text_config", "vision_config"}:
        assert after[key] == before[key], key

    if name != "qwen3_vl_moe":  # whose experts are not quantized
        stored = choose_matrices(tmp_path / "theirs")  # in fewer bits: those of the text alone
        assert stored and not any("vis" in tensor or "connector" in tensor for tensor in stored)

    batch, sequences, images = make_batch(VISION[name])
    tokens = np.asarray(batch.tokens)
    probe = np.random.default_rng(2).standard_normal((*tokens.shape, 97)).astype(np.float32)
    logits, grads = run(model, batch, probe)
    theirs.zero_grad()
    for sequence in sequences:
        ids = tokens[sequence.row, sequence.places]
        inputs = processed(VISION[name], ids, [images[number] for number in sequence.images])
        inputs = {key: torch.from_numpy(value) for key, value in inputs.items()}
        out = theirs(use_cache=False, **inputs).logits[0]
        ours = logits[sequence.row, sequence.places]
        assert relative_error(ours, out.detach().numpy()) < 1e-5, sequence
        seen = sequence.seen
        weight = torch.from_numpy(probe[sequence.row, sequence.places[seen:]])
        (out[seen:] * weight).sum().div(probe.size).backward()

    shell = copy.deepcopy(theirs)
    with torch.no_grad():
        for parameter, gradient in zip(shell.parameters(), theirs.parameters(), strict=True):
            parameter.copy_(gradient.grad)
        for path, buffer in shell.named_buffers():
            if path.endswith(("layer_scalar", "_bias", "_scale", "_min", "_max")):
                buffer.zero_()
    shell.save_pretrained(tmp_path / "grads")
    their_grads = leaves(loading.load(tmp_path / "grads"))
    assert set(grads) == set(their_grads)
    scale = max(np.abs(grad).max() for grad in their_grads.values())
    towers = [np.abs(g).max() for path, g in their_grads.items() if path.startswith("vision.tower")]
    assert max(towers) > 1e-3 * scale
    for path, grad in their_grads.items():
        if np.abs(grad).max() < 1e-6 * scale:  # rounding noise, as of a bias on keys
            assert np.abs(grads[path]).max() < 1e-5 * scale, path
        else:
            # In float64 torch's own gradients of this family differ from those by up to 2e-5.
            bound = 3e-5 if name == "gemma4_per_layer" else 1e-5
            assert relative_error(grads[path], grad) < bound, path


@pytest.mark.slow
def test_experts_of_published_folders_are_transposed(tmp_path):
    """transformers reads both layouts, and writes the other one."""
    theirs = reference("qwen3_vl_moe")
    theirs.save_pretrained(tmp_path / "theirs")
    config = families.read_config(tmp_path / "theirs")
    assert not config.transposed_experts
    published = dataclasses.replace(config, transposed_experts=True)
    saving.save(loading.load(tmp_path / "theirs"), published, tmp_path / "published")
    assert families.read_config(tmp_path / "published") == published
    read = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "published")
    for name, value in theirs.state_dict().items():
        assert torch.equal(read.state_dict()[name], value), name


@pytest.mark.parametrize(
    ("name", "keys", "value"),
    [
        ("gemma3", ("mm_tokens_per_image",), -4),
        ("gemma3", ("image_token_index",), 97),
        ("smolvlm", ("image_token_id",), -1),
        ("qwen3_5", ("image_token_id",), "five"),
        ("qwen3_vl", ("vision_config", "patch_size"), 0),
        ("qwen3_vl", ("vision_config", "spatial_merge_size"), 0),
        ("qwen3_vl", ("vision_config", "deepstack_visual_indexes"), [-1]),
        ("qwen3_vl", ("text_config", "rope_parameters", "mrope_section"), 3),
        ("qwen3_vl", ("text_config", "rope_parameters", "mrope_section"), [3, -1, 2]),
        ("qwen2_vl", ("text_config", "rope_parameters", "mrope_section"), [3, 1, 2]),
        ("qwen2_5_vl", ("vision_config", "window_size"), 9),
        ("qwen2_5_vl", ("vision_config", "fullatt_block_indexes"), [4]),
    ],
)
def test_impossible_sizes_are_refused(name, keys, value):
    raw = copy.deepcopy(VISION[name])
    *path, last = keys
    functools.reduce(dict.__getitem__, path, raw)[last] = value
    with pytest.raises(UserError, match=f"{last}.*{re.escape(str(value))}"):
        families.config_from_hf(raw)


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_folders_of_one_level_are_read_and_written(name, tmp_path):
    """The published form: the text beside vision_config, rotations of transformers 4."""
    raw = copy.deepcopy(VISION[name])
    text, vision = raw.pop("text_config"), raw["vision_config"]
    del text["model_type"], vision["model_type"]
    rope = text.pop("rope_parameters")
    text |= {"rope_theta": rope["rope_theta"], "eos_token_id": 7}
    text["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    vision["in_chans"] = vision["spatial_patch_size"] = 3
    config = families.config_from_hf({**raw, **text, "use_sliding_window": False})
    nested = families.config_from_hf(VISION[name])
    assert config.one_level and config.rope == nested.rope and config.rope_axes == nested.rope_axes
    assert config.vision == nested.vision and config.prefix == nested.prefix
    written = config.to_hf()
    assert "text_config" not in written and written["rope_scaling"]["type"] == "mrope"
    assert families.config_from_hf(written) == config
    (tmp_path / "config.json").write_text(json.dumps(written))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert theirs.text_config.hidden_size == text["hidden_size"]
    assert theirs.text_config.eos_token_id == 7
    assert theirs.text_config.rope_parameters["mrope_section"] == rope["mrope_section"]
    assert theirs.vision_config.num_heads == vision["num_heads"]


def test_names_of_transformers_in_memory_are_read_and_written(tmp_path):
    """Trainers save them: text and tower within "model."."""
    theirs = reference("qwen2_5_vl")
    for name, published in (("published", True), ("long", False)):
        theirs.save_pretrained(tmp_path / name, save_original_format=published)
    first, second = (leaves(loading.load(tmp_path / name)) for name in ("published", "long"))
    for path, array in first.items():
        np.testing.assert_array_equal(array, second[path], path)
    config = families.read_config(tmp_path / "long")
    saving.save(loading.load(tmp_path / "long"), config, tmp_path / "ours")
    names = read_flat(tmp_path / "ours").keys()
    assert names == read_flat(tmp_path / "long").keys()
    assert any(name.startswith("model.visual.") for name in names)


def test_windows_are_those_of_transformers():
    from transformers.vision_utils import get_vision_window_index

    grids, merge = [(4, 4), (6, 10), (14, 2), (22, 18), (2, 2)], 2
    patch, window = 5, 41  # 4 features along a side
    images = draw_images(grids, patch)
    packed = pack_images([images], patch, merge, sum(h * w for h, w in grids) + 8)
    order = order_windows(packed, merge, 4)
    index, ends = get_vision_window_index(
        torch.tensor([(1, *grid) for grid in grids]), merge, window, patch
    )
    count = 4 * len(index)
    source = np.asarray(order.source)[0]
    np.testing.assert_array_equal(source[:count:4] // 4, index)
    np.testing.assert_array_equal(source[np.asarray(order.back)[0]], np.arange(count + 8))
    starts = np.asarray(order.since)[0]
    np.testing.assert_array_equal(np.unique(starts[:count]), ends[:-1])
    np.testing.assert_array_equal(np.unique(np.asarray(order.until)[0, :count]), ends[1:])
    np.testing.assert_array_equal(starts[count:], np.arange(count, count + 8))
    host = order_windows(jax.tree.map(np.asarray, packed), merge, 4)
    for ours, theirs in zip(host, order, strict=True):
        assert isinstance(ours, np.ndarray)
        np.testing.assert_array_equal(ours, theirs)


def test_what_transformers_ignores_in_published_folders_of_gemma4_is_carried_along():
    raw, ignored = VISION["gemma4"], {"global_head_dim": 72, "default_output_length": 280}
    vision = {**raw["vision_config"], **ignored}
    config = families.config_from_hf({**raw, "vision_config": vision})
    assert config.vision == families.config_from_hf(raw).vision
    assert config.to_hf()["vision_config"].items() >= ignored.items()


def test_tokens_of_an_image_see_all_of_it_in_gemma_alone():
    configs = {name: families.config_from_hf(raw) for name, raw in VISION.items()}
    assert [name for name, config in configs.items() if config.image_blocks] == ["gemma3", "gemma4"]


@pytest.mark.slow
def test_a_window_holds_for_images_of_more_tokens(tmp_path):
    """Images of gemma4's batch have 4 tokens; a window of 2 hides what is further back in them, and
    nothing that is ahead."""
    raw = {**VISION["gemma4"]}
    raw["text_config"] = {**raw["text_config"], "sliding_window": 2}
    theirs = make_torch(raw)
    theirs.save_pretrained(tmp_path)
    model = loading.load(tmp_path)
    batch, sequences, images = make_batch(raw)
    logits = jax.jit(lambda batch: model.logits(model.hidden(batch).hidden))(batch)
    for sequence in sequences:
        ids = np.asarray(batch.tokens)[sequence.row, sequence.places]
        inputs = processed(raw, ids, [images[number] for number in sequence.images])
        with torch.no_grad():
            inputs = {key: torch.from_numpy(value) for key, value in inputs.items()}
            expected = theirs(use_cache=False, **inputs).logits[0].numpy()
        actual = np.asarray(logits)[sequence.row, sequence.places]
        assert relative_error(actual, expected) < 1e-5, sequence


def test_text_alone_runs_no_tower():
    config = families.config_from_hf(VISION["smolvlm"])
    model = build.init(config, 0)
    batch = make_batch(VISION["smolvlm"])[0]._replace(images=None)
    probe = np.ones((*batch.tokens.shape, 97), np.float32)
    _, grads = run(model, batch, probe)
    for path, grad in grads.items():
        assert grad.any() != path.startswith("vision."), path
    model.vision = None  # so that any use of it would fail
    jax.eval_shape(model.hidden, batch)


@pytest.mark.thorough
@pytest.mark.parametrize("name", [name for name in VISION if name != "idefics3"])
def test_branches_packed_and_alone_are_equal_on_every_mesh(name):
    """In float64, so that nothing but the order of sums differs; scanned and layer by layer."""
    raw = VISION[name]
    with jax.enable_x64(True):
        config = families.config_from_hf(raw)
        wide = {"param_dtype": "float64", "dtype": "float64"}
        model = build.init(config, 0, **wide)
        batch, sequences, images = make_batch(raw)
        probe = np.random.default_rng(2).standard_normal((*batch.tokens.shape, 97))
        logits, grads = run(model, batch, probe)
        for sequence in sequences:
            tokens = (
                jnp.zeros((1, 48), jnp.int32)
                .at[0, : len(sequence.places)]
                .set(batch.tokens[sequence.row, sequence.places])
            )
            order = jnp.arange(48, dtype=jnp.int32)[None]
            slots = np.full((1, 48), -1, np.int32)
            marked = np.flatnonzero(np.asarray(tokens[0]) == 5)
            slots[0, marked] = np.arange(len(marked))
            shown = [images[number] for number in sequence.images]
            alone = batch._replace(
                tokens=tokens,
                positions=order,
                prev=order - 1,
                until=jnp.full((1, 48), 48, jnp.int32),
                weights={},
                streams={IMAGE_SLOT: jnp.asarray(slots)},
                images=pack_images([shown], raw["vision_config"]["patch_size"], merge_of(raw), 72),
            )
            expected = model.logits(model.hidden(alone).hidden)[0, : len(sequence.places)]
            actual = logits[sequence.row, sequence.places]
            np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-11)

        unrolled = build.init(config, 0, scan_layers=False, **wide)
        graphdef, state = nnx.split(unrolled)
        for sizes in ({}, {"fsdp": 2}, {"tensor": 2}, {"context": 2}):
            mesh = make_mesh(jax.devices()[: 2 if sizes else 1], **sizes)
            with jax.set_mesh(mesh):
                placed = nnx.merge(graphdef, jax.device_put(state, shardings(state, mesh)))
                stacked = jax.tree.map(lambda x: np.asarray(x)[None], batch)
                fed = jax.tree.map(lambda x: x[0], feed(stacked, mesh))
                actual, actual_grads = run(placed, fed, probe)
            np.testing.assert_allclose(actual, logits, rtol=0, atol=1e-11)
            for path, grad in grads.items():
                error = np.abs(actual_grads[path] - grad).max()
                assert error <= 1e-9 * max(np.abs(grad).max(), 1e-6), (sizes, path)
