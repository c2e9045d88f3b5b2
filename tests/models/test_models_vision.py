"""Models that read images against transformers in torch: logits and all gradients of packed rows
with several images, whose branches torch reads alone; folders; what each part adds."""

import copy
import functools

import numpy as np
import pytest

pytest.importorskip("torch", reason="parity needs torch, which this environment has not")

import jax
import torch
import transformers
from flax import nnx
from test_models_families import leaves, make_torch, read_flat, relative_error
from tiny_vision import VISION, make_batch, pixel_values

from jaxtrain.models import families, loading, saving


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


@pytest.mark.parametrize("name", sorted(VISION))
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
    again = transformers.AutoConfig.from_pretrained(tmp_path / "ours").to_dict()
    aside = ("_name_or_path", "transformers_version", "dtype", "architectures")
    for key, value in (
        transformers.AutoConfig.from_pretrained(tmp_path / "theirs").to_dict().items()
    ):
        if key not in (*aside, "text_config", "vision_config"):
            assert again[key] == value, key

    batch, sequences, images = make_batch(VISION[name])
    tokens = np.asarray(batch.tokens)
    probe = np.random.default_rng(2).standard_normal((*tokens.shape, 97)).astype(np.float32)
    logits, grads = run(model, batch, probe)
    theirs.zero_grad()
    for sequence in sequences:
        pixels = pixel_values([images[number] for number in sequence.images])
        out = theirs(
            input_ids=torch.from_numpy(tokens[sequence.row, sequence.places][None]).long(),
            pixel_values=torch.from_numpy(pixels[None]),
            use_cache=False,
        ).logits[0]
        ours = logits[sequence.row, sequence.places]
        assert relative_error(ours, out.detach().numpy()) < 1e-5, sequence
        seen = sequence.seen
        weight = torch.from_numpy(probe[sequence.row, sequence.places[seen:]])
        (out[seen:] * weight).sum().div(probe.size).backward()

    shell = copy.deepcopy(theirs)
    with torch.no_grad():
        for parameter, gradient in zip(shell.parameters(), theirs.parameters(), strict=True):
            parameter.copy_(gradient.grad)
    shell.save_pretrained(tmp_path / "grads")
    their_grads = leaves(loading.load(tmp_path / "grads"))
    assert set(grads) == set(their_grads)
    scale = max(np.abs(grad).max() for grad in their_grads.values())
    for path, grad in their_grads.items():
        if np.abs(grad).max() < 1e-6 * scale:  # rounding noise, as of a bias on keys
            assert np.abs(grads[path]).max() < 1e-5 * scale, path
        else:
            assert relative_error(grads[path], grad) < 1e-5, path
