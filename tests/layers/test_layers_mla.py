"""Latent attention: the absorbed way of decoding is the expanded one, whatever its matrices are
stored as; packed rows gone on from; what it keeps. Parity is in tests/models/families_mla.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jaxtrain_kernels import Context

from jaxtrain.adapters.int8 import Int8, quantize_int8
from jaxtrain.adapters.lora import DoRA, LoRA
from jaxtrain.adapters.nf4 import NF4, quantize_nf4
from jaxtrain.distributed.mesh import make_mesh
from jaxtrain.layers import mla
from jaxtrain.layers.linear import LayerInit
from jaxtrain.layers.mixer import Decoding, LayerInputs, LayerSpec
from jaxtrain.layers.mla import LatentAttention, LatentOptions
from jaxtrain.layers.rope import PositionScale, angles, frequencies

D, N, P, R, V, C = 24, 4, 10, 6, 9, 64
SPEC = LayerSpec()
SLOTS = 40
FREQUENCY, _ = frequencies(R, {"rope_theta": 100.0})


def make_layer() -> LatentAttention:
    sizes = {"plain_dim": P, "rotated_dim": R, "value_dim": V, "query_rank": 20, "latent_rank": C}
    options = LatentOptions(**sizes, position_scale=PositionScale(0.3, 5))
    layer = LatentAttention(D, N, options, init=LayerInit(nnx.Rngs(0), 0.3))
    layer.kv_norm.scale[...] += 0.3 * jax.random.normal(jax.random.key(1), (C,))
    return layer


def store(layer: LatentAttention, how: str) -> LatentAttention:
    """The layer with W_kvb stored or corrected otherwise."""
    linear, rng = layer.kv_b, np.random.default_rng(2)
    kernel = linear.kernel[...]
    out = kernel.shape[1]
    a, b = (jnp.asarray(0.2 * rng.standard_normal(s), jnp.float32) for s in ((C, 3), (3, out)))
    axes = ("embed", "heads")
    if how == "int8":
        linear.kernel = Int8(quantize_int8(kernel), axes)
    if how.startswith("nf4"):
        linear.kernel = NF4(quantize_nf4(kernel), axes)
    if how.endswith("lora"):
        linear.adapter = LoRA(a, b, 2.0, axes)
    if how == "dora":
        magnitude = jnp.asarray(1 + rng.random(out), jnp.float32)
        linear.adapter = DoRA(a, b, magnitude, 2.0, axes)
    return layer


def decode(layer, x_BTD, state, decoding):
    T = x_BTD.shape[1]
    positions = decoding.start[:, None] + jnp.arange(T, dtype=jnp.int32)
    until = jnp.where(positions < decoding.end[:, None], T, 0).astype(jnp.int32)
    turns = angles(positions, FREQUENCY, 1.0, jnp.float32)
    inputs = LayerInputs(Context(until, None, positions, positions), SPEC, turns, decoding)
    return layer(x_BTD, inputs, state)


def read_and_go_on(layer, both_sides: bool = False):
    """(what 5 new tokens of 3 rows find, of which 5, 2 and none count; the state)."""
    rng = np.random.default_rng(3)
    x = jnp.asarray(rng.standard_normal((3, 14, D)), jnp.float32)
    start = jnp.array([9, 4, 7], jnp.int32)
    state = layer.init_state(SPEC, 3, SLOTS, jnp.float32)
    _, state = decode(layer, x[:, :9], state, Decoding(jnp.zeros(3, jnp.int32), start))
    end = start + jnp.array([5, 2, 0], jnp.int32)
    return decode(layer, x[:, 9:], state, Decoding(start, end, end if both_sides else None))


@pytest.mark.parametrize(
    "how",
    [
        "plain",
        *(
            pytest.param(how, marks=pytest.mark.slow)
            for how in ("int8", "nf4_lora", "lora", "dora", "both_sides")
        ),
    ],
)
def test_absorbed_is_expanded(how, monkeypatch):
    layer = store(make_layer(), how)
    go_on = functools.partial(read_and_go_on, both_sides=how == "both_sides")
    actual, state = jax.jit(lambda layer: go_on(layer))(layer)
    monkeypatch.setattr(mla, "FEW", 0)
    expected, second = jax.jit(lambda layer: go_on(layer))(layer)
    # The first row's prompt is read by either way, too: float32 sums in another order.
    np.testing.assert_allclose(state.latent, second.latent, atol=1e-6)
    for row, count in enumerate((5, 2, 0)):
        scale = float(np.abs(expected).max())
        np.testing.assert_allclose(actual[row, :count], expected[row, :count], atol=1e-5 * scale)


def test_on_several_devices():
    """Heads over the tensor axis, latents whole on each."""
    layer = make_layer()
    expected, _ = jax.jit(lambda layer: read_and_go_on(layer))(layer)
    with jax.set_mesh(make_mesh(tensor=2, data=1, devices=jax.devices()[:2])):
        actual, state = jax.jit(read_and_go_on)(layer)
    np.testing.assert_allclose(actual[0], expected[0], atol=1e-5 * float(np.abs(expected).max()))


def test_a_latent_is_all_that_is_kept():
    layer = make_layer()
    (latent,) = jax.tree.leaves(layer.init_state(SPEC, 2, 7, jnp.bfloat16))
    assert latent.shape == (2, 7, C + R) and latent.dtype == jnp.bfloat16


def test_packed_rows_are_gone_on_from():
    """A branch behind the middle of a row that was read before, as if it had stood there."""
    x = jnp.asarray(np.random.default_rng(4).standard_normal((1, 10, D)), jnp.float32)
    # Tokens 0 to 6 are a text; 7 to 9 go on from token 3, and do not see 4 to 6.
    positions = jnp.array([[0, 1, 2, 3, 4, 5, 6, 4, 5, 6]], jnp.int32)
    until = jnp.array([[10] * 4 + [7] * 3 + [10] * 3], jnp.int32)

    def append(layer, state, start, stop):
        part, size = slice(start, stop), stop - start
        since = jnp.maximum(jnp.arange(10, dtype=jnp.int32)[None] - start, 0)
        seen = jnp.where(jnp.arange(10) < stop, jnp.clip(until - start, 0, size), 0)
        context = Context(seen.astype(jnp.int32), since, positions[:, part], positions)
        turns = angles(positions[:, part], FREQUENCY, 1.0, jnp.float32)
        index = Decoding(*(jnp.array([end], jnp.int32) for end in (start, stop)))
        return layer(x[:, part], LayerInputs(context, SPEC, turns, index), state)

    @jax.jit
    def both(layer):
        turns = angles(positions, FREQUENCY, 1.0, jnp.float32)
        full, _ = layer(x, LayerInputs(Context(until, None, positions, positions), SPEC, turns))
        first, state = append(layer, layer.init_packed(SPEC, 1, 10, jnp.float32), 0, 7)
        last, _ = append(layer, state, 7, 10)
        return full, jnp.concatenate([first, last], 1)

    full, parts = both(make_layer())
    np.testing.assert_allclose(parts, full, atol=1e-5 * float(np.abs(full).max()))
