"""Tokens that travel to experts of other devices: what one device computes, whatever the routing,
the buffers and the way; in float64, so that only the order of sums may differ."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxtrain.distributed.mesh import make_mesh
from jaxtrain.layers.expert_transport import (
    ExpertGroup,
    Transport,
    exchanges,
    send_through,
    share_of_devices,
)
from jaxtrain.layers.linear import LayerInit
from jaxtrain.layers.moe import MoE, MoEOptions
from jaxtrain.layers.router import Router, RoutingOptions

n, T, D, F, E, TOP = 4, 18, 3, 5, 8, 2
AXES = ("expert",)


def compute(x, ids, gates, trained, fixed, rows=None):
    """Dense equivalent of the kernels: gate * (tanh(x W + shift) V), nothing for whom there is no
    room."""
    (w, v), shift = trained, fixed
    local = (ids >= 0) & (ids < len(w))
    if rows is not None:
        rank = jnp.cumsum(local.reshape(-1)).reshape(ids.shape)
        local = local & (rank <= rows)
    share = jnp.where(local, gates, 0)[..., None] * jax.nn.one_hot(ids, len(w), dtype=x.dtype)
    hidden = jnp.tanh(jnp.einsum("td,edf->tef", x, w) + shift)
    return jnp.einsum("tef,efd,tke->td", hidden, v, share)


def routes(kind: str) -> np.ndarray:
    rng = np.random.default_rng(1)
    ids = np.stack([rng.permutation(E)[:TOP] for _ in range(n * T)]).astype(np.int32)
    if kind == "one device":  # and six experts with none
        ids = np.tile(np.arange(TOP, dtype=np.int32), (n * T, 1))
    elif kind == "hot expert":
        ids = np.where(ids == 5, ids[:, ::-1], ids)
        ids[:, 0] = np.where(ids[:, 1] == 5, ids[:, 0], 5)
    elif kind == "padding":  # the last device has nothing else
        ids[-T:] = -1
        ids[3] = -1
    return ids


@pytest.fixture(scope="module")
def arrays():
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        draw = lambda *shape: jnp.asarray(rng.normal(size=shape))  # noqa: E731
        weights = (draw(E, D, F), draw(E, F, D))
        yield draw(n * T, D), draw(n * T, TOP), weights, draw(E, 1, F)[:, 0], draw(n * T, D)


def loss(run, x, gates, weights, shift, ids, target):
    y, rounds = run(x, ids, gates, weights, shift)
    return (y * target).sum(), (y, rounds)


def differentiate(run):
    return jax.jit(jax.value_and_grad(functools.partial(loss, run), (0, 1, 2), has_aux=True))


def one_device(x, ids, gates, weights, shift):
    return compute(x, ids, gates, weights, shift), 1.0


def on_mesh(transport: Transport, mesh):
    def local(x, ids, gates, weights, shift):
        group = ExpertGroup(AXES, AXES, E, transport.kind == "exchange")
        y, rounds = send_through(transport, group, compute, x, ids, gates, weights, shift)
        return y, rounds[None]

    by_token = P(AXES)
    return jax.shard_map(local, mesh=mesh, in_specs=by_token, out_specs=by_token, check_vma=False)


SMALL = 0.01
"""As buffer: rounds even where load is even."""
TRANSPORTS = {
    "gather": Transport("gather", 9.0),
    "gather in rounds": Transport("gather", SMALL, wide_sums=True),
    "exchange in rounds": Transport("exchange", SMALL),
    "gather in chunks": Transport("gather", chunks=3),
    "exchange": Transport("exchange", 9.0),
}


@pytest.fixture(scope="module")
def expected(arrays):
    x, gates, weights, shift, target = arrays
    with jax.enable_x64(True):
        run = differentiate(one_device)
        kinds = ("even", "one device", "hot expert", "padding")
        yield {k: run(x, gates, weights, shift, routes(k), target) for k in kinds}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (i > 0)) for i, n in enumerate(TRANSPORTS)]
)
def test_every_routing_gives_what_one_device_computes(name, arrays, expected):
    x, gates, weights, shift, target = arrays
    mesh = make_mesh(jax.devices()[:n], expert=n)
    with jax.enable_x64(True), jax.set_mesh(mesh):
        run, seen = differentiate(on_mesh(TRANSPORTS[name], mesh)), set()
        for kind, ((expectation, (wanted_y, _)), wanted_grads) in expected.items():
            actual = run(x, gates, weights, shift, routes(kind), target)
            (value, (y, rounds)), grads = actual
            np.testing.assert_allclose(value, expectation, rtol=1e-13)
            np.testing.assert_allclose(y, wanted_y, rtol=1e-12, atol=1e-13)
            for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted_grads), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)
            seen.add(int(np.max(rounds)))
    assert (max(seen) > 1) == ("rounds" in name or "chunks" in name), seen


def test_share_of_devices_and_choice():
    """Qwen3-30B-A3B on 8 devices: a token has an expert on two thirds of them."""
    assert share_of_devices(128, 8, 8) == pytest.approx(0.667, abs=1e-3)
    rng = np.random.default_rng(0)
    has = [(rng.permutation(32)[:4] < 8).any() for _ in range(4000)]
    assert share_of_devices(32, 4, 4) == pytest.approx(np.mean(has), abs=0.03)
    auto = Transport()
    assert [exchanges(auto, 128, 8, n) for n in (1, 2, 8, 16)] == [False, False, False, True]
    assert exchanges(auto, 64, 4, 8)
    assert not exchanges(Transport("exchange"), 64, 4, 1)


@pytest.mark.slow
def test_scaled_inputs_travel_as_on_one_device():
    """Llama 4's experts, two for each token: also of a document of one token, which looks like
    padding, before padding."""
    rng = np.random.default_rng(0)
    init = LayerInit(nnx.Rngs(0), std=1.0)
    router = Router(D, E, RoutingOptions(top=TOP, score="sigmoid"), init=init)
    mixture = MoE(router, D, F, E, MoEOptions(activation="silu", scale_inputs=True), init=init)
    graphdef, state = nnx.split(mixture)
    x = jnp.asarray(rng.normal(size=(n, 6, D)), jnp.float32)
    real = jnp.asarray(np.tile([True] * 4 + [False] * 2, (n, 1)))
    run = jax.jit(lambda state: nnx.merge(graphdef, state).mix(x, real)[0])
    expected = np.asarray(run(state))
    with jax.set_mesh(make_mesh(jax.devices()[:n], expert=n)):
        actual = np.asarray(run(state))
    np.testing.assert_allclose(actual[:, :5], expected[:, :5], rtol=1e-5, atol=1e-6)
    assert np.abs(expected[:, :5]).min() > 0 and not actual[:, 5].any()
