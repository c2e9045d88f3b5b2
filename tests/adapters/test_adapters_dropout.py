"""Random draws of training: dropout on adapters as PEFT has it, noise on embeddings; the same
numbers on every mesh and split, none outside of training."""

import dataclasses
import functools
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

pytest.importorskip("peft", reason="parity needs torch and peft, which this environment has not")

import torch
from peft import LoraConfig, get_peft_model
from transformers.integrations.neftune import neftune_post_forward_hook

from jaxtrain.adapters.attach import attach
from jaxtrain.adapters.lora import DoRA, LoRA
from jaxtrain.core.losses.nll import nll_loss
from jaxtrain.core.step import StepNoise, init_state, make_step
from jaxtrain.distributed.feed import feed
from jaxtrain.distributed.mesh import make_mesh
from jaxtrain.errors import UserError
from jaxtrain.layers.noise import (
    RowNoise,
    add_embedding_noise,
    drop_out,
    hash_bits,
    longest,
    row_rng_bits,
    token_rng_bits,
)
from jaxtrain.models import build
from jaxtrain.models.parameters import split_model

sys.path.insert(0, str(Path(__file__).parent))
from test_adapters_lora import CONFIG, documents_batch, make_adapter, open_model, regroup

WORDS = np.asarray(token_rng_bits(row_rng_bits(0, jnp.int32(3), jnp.arange(2)), 5))


class Masked(torch.nn.Module):
    """In the place of PEFT's dropout: the mask that was drawn here."""

    def __init__(self, mask):
        super().__init__()
        self.mask = torch.tensor(mask)

    def forward(self, x):
        return x * self.mask


@pytest.mark.parametrize("dora", [pytest.param(False, marks=pytest.mark.slow), True])
def test_output_and_gradients_are_those_of_peft_under_the_same_mask(dora):
    rng = np.random.default_rng(0)
    x, kernel, a, b = (
        rng.standard_normal(shape).astype(np.float32)
        for shape in [(2, 5, 8), (8, 6), (8, 3), (3, 6)]
    )
    magnitude, rate, salt = np.linspace(1, 2, 6, dtype=np.float32), 0.4, 7
    mask = np.asarray(drop_out(jnp.ones(x.shape), WORDS, salt, rate))
    linear = torch.nn.Sequential(torch.nn.Linear(8, 6, bias=False))
    linear[0].weight.data = torch.tensor(kernel.T)
    config = LoraConfig(r=3, lora_alpha=6, lora_dropout=rate, target_modules=["0"], use_dora=dora)
    model = get_peft_model(linear, config).train()
    layer = model.base_model.model[0]
    layer.lora_A["default"].weight.data = torch.tensor(a.T)
    layer.lora_B["default"].weight.data = torch.tensor(b.T)
    layer.lora_dropout["default"] = Masked(mask)
    reference = [layer.lora_A["default"].weight, layer.lora_B["default"].weight]
    if dora:
        layer.lora_magnitude_vector["default"].weight.data = torch.tensor(magnitude)
        reference.append(layer.lora_magnitude_vector["default"].weight)
    expected = model(torch.tensor(x))
    expected.square().sum().backward()

    def ours(factors):
        axes = ("embed", "mlp")
        actual = (
            DoRA(*factors, 2.0, axes, rate, salt) if dora else LoRA(*factors, 2.0, axes, rate, salt)
        )
        actual.rng_bits = jnp.asarray(WORDS)
        return actual(jnp.asarray(x), jnp.asarray(x @ kernel), jnp.asarray(kernel))

    factors = [jnp.asarray(entry) for entry in (a, b, *([magnitude] if dora else []))]
    actual = ours(factors)
    # float32 products in another order.
    np.testing.assert_allclose(actual, expected.detach(), rtol=1e-4, atol=1e-4)
    grads = jax.grad(lambda factors: jnp.square(ours(factors)).sum())(factors)
    for grad, parameter in zip(grads, reference, strict=True):
        np.testing.assert_allclose(grad, parameter.grad.numpy().T, rtol=1e-3, atol=1e-3)


def test_masks_are_drawn_anew_for_each_token_layer_matrix_and_step():
    ones = jnp.ones((2, 5, 4000))

    def mask(step=3, layer=1, salt=7):
        rng_bits = token_rng_bits(row_rng_bits(0, jnp.int32(step), jnp.arange(2)), 5)
        return np.asarray(drop_out(ones, hash_bits(rng_bits, layer), salt, 0.25)) > 0

    first = mask()
    # Five standard deviations of 4,000 draws are 0.034; of 40,000, 0.011.
    assert np.abs(first.mean(-1) - 0.75).max() < 0.034
    peers = [mask(step=4), mask(layer=2), mask(salt=8), np.roll(first, 1, 1), np.roll(first, 1, 2)]
    for second in peers:
        assert abs((first & second).mean() - 0.75**2) < 0.012
    np.testing.assert_array_equal(first, mask())


@pytest.mark.slow
def test_noise_reaches_as_far_as_in_transformers_and_goes_by_the_texts_own_length():
    alpha, T, D = 5.0, 6, 64
    hook = SimpleNamespace(training=True, neftune_noise_alpha=alpha)
    reference = neftune_post_forward_hook(hook, None, torch.zeros(1, T, D)).abs().max().item()
    rng_bits = token_rng_bits(row_rng_bits(0, jnp.int32(0), jnp.arange(1)), 2 * T)
    positions = jnp.arange(2 * T)[None] % T
    until = jnp.where(jnp.arange(2 * T) < T, T, 2 * T)[None]
    array = np.asarray(
        add_embedding_noise(jnp.zeros((1, 2 * T, D)), rng_bits, positions, until, alpha)
    )
    reach = alpha / np.sqrt(T * D)
    assert 0.97 * reach < np.abs(array).max() <= reach and 0.97 * reach < reference <= reach
    assert abs(array.mean()) < 0.1 * reach


def test_the_longest_branch_through_a_token():
    rng = np.random.default_rng(0)
    prev = np.array([-1, *(rng.integers(max(0, n - 3), n) for n in range(1, 21)), -1, 21, -1])
    # Made depth first: a parent is one of the open path.
    path, positions = [], []
    for token, parent in enumerate(prev):
        while path and path[-1] != parent and parent in path:
            path.pop()
        if parent not in path:
            path = []
        prev[token] = path[-1] if path else -1
        positions.append(len(path))
        path.append(token)
    ends = [
        next((n for n in range(t + 1, len(prev)) if positions[n] <= positions[t]), len(prev))
        for t in range(len(prev))
    ]
    expected = [max(positions[t : ends[t]]) + 1 for t in range(len(prev))]
    actual = longest(jnp.array([positions]), jnp.array([ends]))
    np.testing.assert_array_equal(actual[0], expected)


ADAPTER = make_adapter(("all-linear",), full=("embed.embedding",))


@functools.cache
def trained_step(mesh=None, microsteps=1, dropout=0.3, alpha=8.0, step=0, **options):
    """Gradients as one step sees them."""

    mesh = mesh or make_mesh(jax.devices()[:1])
    adapter = dataclasses.replace(ADAPTER, dropout=dropout)
    with jax.set_mesh(mesh):
        trained, frozen, rebuild = open_model(adapter, mesh, noise=0.1, **options)

        def give(model, rng_bits):
            model.noise = RowNoise(rng_bits, alpha)
            return model

        sgd = optax.sgd(1.0)
        run = make_step(
            rebuild,
            nll_loss,
            {"nll": 1.0},
            sgd,
            None,
            noise=StepNoise(0, give) if dropout else None,
        )
        start = jax.device_get(trained)
        state = init_state(trained, sgd)._replace(step=jnp.int32(step))
        batch = feed(regroup(documents_batch(rows=4), microsteps), mesh)
        after, output = run(state, batch, frozen)
        grads = {path: start[path] - value for path, value in jax.device_get(after.params).items()}
        return grads, float(output.metrics["loss"][0])


@pytest.mark.thorough
def test_a_step_draws_the_same_on_any_mesh_and_split_and_anew_in_the_next():
    grads, loss = trained_step()
    split = trained_step(make_mesh(data=2, fsdp=2), 1, remat="full", scan_layers=False)
    accumulated = trained_step(None, 2, remat="full")
    for second, other_loss in (split, accumulated):
        assert abs(loss - other_loss) < 1e-5
        for path, value in grads.items():
            # fp32 sums in another order.
            np.testing.assert_allclose(second[path], value, atol=1e-5 * np.abs(value).max())
    assert abs(trained_step(step=1)[1] - loss) > 1e-3


def test_nothing_is_drawn_outside_of_training():
    """The program of an evaluation is the same with dropout and without."""
    batch = jax.tree.map(lambda leaf: leaf[0], documents_batch(rows=4))

    def program(adapter, noise=None):
        model = attach(build.abstract(CONFIG), adapter)
        shapes, rebuild = split_model(model)

        def run(params):
            model = rebuild(params)
            model.noise = noise
            return nll_loss(model, batch)

        return re.sub("0x[0-9a-f]+", "", str(jax.make_jaxpr(run)(shapes)))

    dropping = dataclasses.replace(ADAPTER, dropout=0.3)
    assert program(dropping) == program(ADAPTER)
    rng_bits = row_rng_bits(0, jnp.int32(0), jnp.arange(4))
    assert program(dropping, RowNoise(rng_bits)) != program(ADAPTER, RowNoise(rng_bits))


def test_what_cannot_drop_says_so():
    lo_ra = LoRA(jnp.ones((4, 2)), jnp.ones((2, 4)), 1.0, ("embed", "mlp"), 0.5)
    lo_ra.rng_bits = jnp.zeros((2, 3), jnp.uint32)
    with pytest.raises(UserError, match="adapter.dropout"):
        lo_ra(jnp.ones((5, 4)), jnp.ones((5, 4)), None)
