"""Attention sinks against a softmax with one more column: every backend, and decoding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jaxtrain_kernels import Context, attention, decode_attention, testing
from jaxtrain_kernels.decode_attention import gpu
from jaxtrain_kernels.tree_attention import mosaic_gpu, tpu, xla
from mosaic_interpreter import interpreted
from test_kernels_tree_attention_gpu import options

NAMES = ("out", "dq", "dk", "dv", "dsinks")


def by_a_column(q, k, v, sinks, mask, softcap=None):
    """The definition, written as gpt-oss does: the sink is a column of scores that is dropped."""
    H, groups = q.shape[-1], q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, groups, 2) for x in (k, v))
    score = jnp.einsum("btnh,bsnh->bnts", q, k) * H**-0.5
    if softcap is not None:
        score = softcap * jnp.tanh(score / softcap)
    score = jnp.where(mask[:, None], score, -jnp.inf)
    column = jnp.broadcast_to(sinks[None, :, None, None], (*score.shape[:3], 1))
    weight = jax.nn.softmax(jnp.concatenate([score, column], -1), -1)[..., :-1]
    return jnp.einsum("bnts,bsnh->btnh", weight, v)


def make(B=2, T=48, N=4, K=2, H=8, V=None, used=40, seed=3):
    """Arrays in float64, sinks from -30 to 30; the first queries of the last row see nothing."""
    rng = np.random.default_rng(seed)
    rows = [testing.pack(testing.random_forest(rng, used, mean=6), T) for _ in range(B)]
    until, positions = (np.stack([row[name] for row in rows]) for name in ("until", "positions"))
    since = np.tile(np.arange(T, dtype=np.int32), (B, 1))
    since[-1, :5] = 5
    V = V or H
    arrays = [rng.standard_normal((B, T, *size)) for size in ((N, H), (K, H), (K, V))]
    sinks = np.resize([30.0, -30.0, 0.7, -1.1], N)
    steps = np.arange(T)[None, :, None]
    mask = (since[:, None] <= steps) & (steps < until[:, None])
    return [*arrays, sinks], rng.standard_normal((B, T, N, V)), (until, since, positions), mask


def pulled(function, arrays, d_out):
    out, pull = jax.vjp(function, *arrays)
    return [np.asarray(x, np.float64) for x in (out, *pull(d_out.astype(out.dtype)))]


@pytest.mark.parametrize("backend", ["reference", "xla", "xla_blocks"])
def test_a_sink_is_a_column_without_a_value(backend):
    arrays, d_out, (until, since, positions), mask = make()
    seen = mask & (positions[:, :, None] - positions[:, None] < 9)
    assert not seen[1, :5].any() and seen.any(2)[0].all()
    with jax.enable_x64(True):
        arrays, d_out = [jnp.asarray(x) for x in arrays], jnp.asarray(d_out)
        context = Context(*(jnp.asarray(x) for x in (until, since, positions, positions)))
        kwargs = {"window": 9, "softcap": 2.0}
        if backend == "xla_blocks":
            run = functools.partial(xla.attention, block=16, scale=8**-0.5)
        else:
            run = functools.partial(attention, impl=backend)

        @jax.jit
        def ours(q, k, v, sinks):
            return run(q, k, v, context, sinks=sinks, **kwargs)

        @jax.jit
        def wanted(q, k, v, sinks):
            return by_a_column(q, k, v, sinks, seen, softcap=2.0)

        for name, a, b in zip(
            NAMES, pulled(ours, arrays, d_out), pulled(wanted, arrays, d_out), strict=True
        ):
            # Sums of at most 48 terms in another order.
            np.testing.assert_allclose(
                a, b, rtol=0, atol=1e-13 * max(1, abs(b).max()), err_msg=name
            )
        assert not pulled(ours, arrays, d_out)[0][1, :5].any()


def check_kernel(kernel, H=64, V=64):
    """bfloat16 kernels: no further from float64 than twice the reference in bfloat16."""
    arrays, d_out, (until, since, _), mask = make(B=1, T=130, N=2, K=1, H=H, V=V, used=120)
    arrays[3] = np.array([0.7, -1.1])
    low = [jnp.asarray(x, jnp.bfloat16) for x in arrays[:3]] + [jnp.asarray(arrays[3], jnp.float32)]
    d_low = jnp.asarray(d_out, jnp.bfloat16)
    context = Context(jnp.asarray(until), jnp.asarray(since))
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x, np.float64)) for x in (*low, d_low)]
        exact = pulled(functools.partial(by_a_column, mask=mask), wide[:4], wide[4])
    bar = pulled(
        lambda q, k, v, s: attention(q, k, v, context, sinks=s, impl="reference"), low, d_low
    )
    actual = pulled(lambda *x: kernel(*x[:3], context, x[3]), low, d_low)
    for name, a, e, b in zip(NAMES, actual, exact, bar, strict=True):
        assert np.isfinite(a).all(), name
        if name == "dsinks":  # sums over 130 tokens of what was rounded to 8 bits
            np.testing.assert_allclose(a, e, atol=0.02 * np.abs(e).max(), err_msg=name)
        else:
            testing.assert_accurate(a, e, b, jnp.bfloat16, name)


@pytest.mark.slow
@pytest.mark.parametrize("H, V", [(64, 64), (192, 128), (512, 512)])
def test_interpreted_hopper_kernels(H, V):
    with interpreted():
        check_kernel(functools.partial(mosaic_gpu.run, options(H)), H, V)


@pytest.mark.slow
def test_interpreted_tpu_kernels():
    setting = tpu.Options(None, None, 64**-0.5, 128, 128)
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()):
        check_kernel(functools.partial(tpu.run, setting))


@pytest.mark.parametrize("backend", ["reference", "xla", "parts", "whole"])
def test_decoding(backend):
    rng = np.random.default_rng(0)
    B, S, N, K, H, few = 3, 70, 6, 2, 64, 2
    q = rng.standard_normal((B, few, N, H)).astype(np.float32)
    k, v = (rng.standard_normal((1, B, S, K, H)).astype(np.float32) for _ in range(2))
    sinks = np.array([30.0, -30.0, 0.0, 1.5, -2.0, 3.0], np.float32)
    until = np.array([[70, 70], [0, 1], [33, 34]], np.int32)
    since = np.maximum(until - 50, 0).astype(np.int32)
    arrays = [jnp.asarray(x) for x in (q, k, v)]
    where = (jnp.int32(0), jnp.asarray(until), jnp.asarray(since))
    slots = np.arange(S)
    mask = (since[..., None] <= slots) & (slots < until[..., None])
    expected = by_a_column(arrays[0], arrays[1][0], arrays[2][0], jnp.asarray(sinks), mask)
    if backend in ("reference", "xla"):
        actual = decode_attention(*arrays, *where, sinks=jnp.asarray(sinks), impl=backend)
    else:
        config = gpu.Config(keys=32, part=24 if backend == "parts" else 256)
        options = {"scale": H**-0.5, "softcap": None, "sinks": jnp.asarray(sinks)}
        actual = gpu.run(config, *arrays, *where, **options, interpret=True)
    # float32, sums in another order
    np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_sinks_that_do_not_fit():
    q = jnp.zeros((1, 4, 2, 8))
    context = Context(jnp.full((1, 4), 4, jnp.int32))
    with pytest.raises(ValueError, match="sinks"):
        attention(q, q, q, context, sinks=jnp.zeros(3))
    with pytest.raises(ValueError, match="sinks"):
        decode_attention(q[:, 0], q[None], q[None], 0, jnp.ones(1, jnp.int32), sinks=jnp.zeros(3))


@pytest.mark.parametrize("slots", [64, 4096])
def test_decoding_lowers_for_a_gpu(slots):
    """The shape of gpt-oss, in one part and in several that are merged."""
    from jax._src.mesh import AbstractDevice

    device = AbstractDevice("NVIDIA H200", 132, "gpu")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)
    q = jax.ShapeDtypeStruct((16, 64, 64), jnp.bfloat16)
    cache = jax.ShapeDtypeStruct((1, 16, slots, 8, 64), jnp.bfloat16)
    rest = [jax.ShapeDtypeStruct((16,), jnp.int32), jax.ShapeDtypeStruct((64,), jnp.float32)]

    def call(q, k, v, until, sinks):
        return decode_attention(q, k, v, 0, until, sinks=sinks, impl="gpu")

    with jax.sharding.use_abstract_mesh(mesh):
        text = jax.jit(call).trace(q, cache, cache, *rest).lower(lowering_platforms=("cuda",))
    assert ("decode_attention_merge" in text.as_text()) == (slots > 64)
