"""Attention's queries and keys: one op for norm and rotation gives what the steps give."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jaxtrain_kernels import Context
from jaxtrain_kernels.rotate_heads import BACKENDS

from jaxtrain.layers import sharded_attention
from jaxtrain.layers.attention import Attention, AttentionOptions
from jaxtrain.layers.fused_linear import MIN_VECTORS
from jaxtrain.layers.linear import LayerInit
from jaxtrain.layers.mixer import LayerInputs, LayerSpec
from jaxtrain.layers.norm import PreciseRMSNorm
from jaxtrain.layers.rope import angles

D, N, K, H = 24, 4, 2, 16


def make(**options):
    init = LayerInit(nnx.Rngs(0), 0.3)
    layer = Attention(D, N, K, H, AttentionOptions(**options), init=init)
    for norm in (layer.q_norm, layer.k_norm):
        if norm is not None:
            scale = jax.random.uniform(jax.random.key(3), norm.scale.shape, minval=0.5, maxval=2.0)
            norm.scale.set_value(scale)
    return layer


def inputs(B, T, rotated=H):
    positions_BT = jnp.tile(jnp.arange(T, dtype=jnp.int32), (B, 1))
    frequency = 1e4 ** (-np.arange(rotated // 2) / (rotated // 2))
    turns = angles(positions_BT, frequency, 1.0, jnp.float32)
    context = Context(jnp.full((B, T), T, jnp.int32), None, positions_BT, positions_BT)
    return LayerInputs(context, LayerSpec(), turns)


def step(layer, B=1, T=MIN_VECTORS, rotated=H):
    """Output and gradients, jitted: of the layer's parameters and its input."""
    x_BTD = jax.random.normal(jax.random.key(1), (B, T, D))
    arguments, (graphdef, params) = inputs(B, T, rotated), nnx.split(layer)

    @jax.jit
    def run(params, x_BTD):
        def total(params, x_BTD):
            y_BTD, _ = nnx.merge(graphdef, params)(x_BTD, arguments)
            return jnp.sin(y_BTD).sum(), y_BTD

        return jax.value_and_grad(total, (0, 1), has_aux=True)(params, x_BTD)

    return jax.tree.leaves(run(params, x_BTD))


def asked(monkeypatch):
    """Calls of the op's Hopper backend, which declines them all."""
    calls = []

    def declines(x, cos, sin, counts, *rest, **options):
        calls.append(counts)
        raise NotImplementedError("a test")

    monkeypatch.setitem(BACKENDS, "mosaic_gpu", declines)
    return calls


@pytest.mark.parametrize("qk_norm, rotated", [("head", H), (None, H), (None, H // 2)])
def test_one_op_changes_no_number(monkeypatch, qk_norm, rotated):
    calls = asked(monkeypatch)
    layer = make(qk_norm=qk_norm)
    together = step(layer, rotated=rotated)
    assert set(calls) == {(N, K)}
    monkeypatch.setattr(Attention, "_rotate_fused", lambda *_: None)
    for a, b in zip(together, step(layer, rotated=rotated), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    "options",
    [
        {"adjacent": True},
        {"qk_norm": "head", "norm": PreciseRMSNorm},
        *(
            pytest.param(options, marks=pytest.mark.slow)
            for options in ({"qk_norm": "all_heads"}, {"output_gate": "joint"}, {"v_norm": True})
        ),
        {"qk_norm": "rotated_head"},
        {"qkv_bias": True},
        {"clip": 1.0},
        {"output_gate": "own"},
        {"values": "keys"},
    ],
    ids=str,
)
def test_what_the_op_does_not_do_is_left_to_the_steps(monkeypatch, options):
    calls = asked(monkeypatch)
    step(make(**options))
    assert not calls


@pytest.mark.slow
def test_few_tokens_are_left_to_the_steps(monkeypatch):
    calls = asked(monkeypatch)
    step(make(qk_norm="head"), T=MIN_VECTORS // 2)
    assert not calls


@pytest.mark.parametrize(
    "axes",
    [
        pytest.param({"fsdp": 4}, marks=pytest.mark.thorough),
        pytest.param({"fsdp": 2, "tensor": 2}, marks=pytest.mark.slow),
        pytest.param({"context": 2, "data": 2}, marks=pytest.mark.thorough),
    ],
)
def test_heads_on_several_devices(monkeypatch, axes):
    """Devices rotate their own heads, as on Hopper GPUs; the GPU kernel declines here."""
    alone = step(make(qk_norm="head"), B=4, T=64)
    calls = asked(monkeypatch)
    monkeypatch.setattr(sharded_attention, "on_hopper", lambda: True)
    mesh = jax.make_mesh(
        tuple(axes.values()), tuple(axes), (jax.sharding.AxisType.Auto,) * len(axes)
    )
    with jax.set_mesh(mesh):
        spread = step(make(qk_norm="head"), B=4, T=64)
    assert calls and calls[0] == (N // axes.get("tensor", 1),)
    for a, b in zip(spread, alone, strict=True):
        # float32: sums over tokens and features in another order.
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
