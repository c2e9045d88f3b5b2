"""decode_attention on caches of 8 bits against float64 numpy; the GPU kernel interpreted."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtrain_kernels import decode_attention, testing
from jaxtrain_kernels.decode_attention import gpu
from jaxtrain_kernels.decode_attention.cases import CASES
from test_kernels_decode_attention import interpreted, numpy_decode_attention, plainly

CI = [case for case in CASES if "ci" in case.tags]
STORED = {"int8": (jnp.int8, 127), "fp8": (jnp.float8_e4m3fn, 448)}
SPOILT = {"int8": 127, "fp8": jnp.nan}


def store(x, stored):
    """Codes and float32 scales of the last dim: the largest magnitude becomes the largest code."""
    dtype, largest = STORED[stored]
    scale = jnp.abs(x).max(-1) / largest
    codes = x / jnp.where(scale > 0, scale, 1.0)[..., None]
    return (jnp.round(codes) if stored == "int8" else codes).astype(dtype), scale


def arrays(case, stored, dtype="bfloat16"):
    """q; codes and scales of k and v, whose slots are of very different sizes; until, since."""
    inputs = case.inputs()
    sizes = np.random.default_rng(1).uniform(-2, 2, inputs["k"].shape[:-1])[..., None]
    (k, k_scale), (v, v_scale) = (
        store(jnp.asarray(inputs[name] * np.exp(sizes * factor), jnp.float32), stored)
        for name, factor in (("k", 0.5), ("v", 1.0))
    )
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    return jnp.asarray(inputs["q"], dtype), k, v, scales, *case.interval()


def check(case, stored, dtype, function):
    """`function` against numpy on what the codes stand for; slots that nobody sees and other layers
    hold what must not be used."""
    q, k, v, scales, until, since = arrays(case, stored, dtype)
    layer = case.layers - 1
    wide = [
        x[layer].astype(jnp.float32) * scales[f"{name}_scale"][layer, ..., None]
        for name, x in (("k", k), ("v", v))
    ]
    exact = numpy_decode_attention(
        q.astype(jnp.float32), *wide, until, since, case.head_dim**-0.5, case.softcap
    )
    plain = plainly(q, *(x.astype(dtype) for x in wide), until, since, case.softcap)
    slots = np.arange(case.slots)
    unseen_BS1 = ((slots < since[:, None]) | (slots >= until[:, None]))[..., None]
    k, v = (jnp.where(unseen_BS1[..., None], SPOILT[stored], x).astype(k.dtype) for x in (k, v))
    scales = {name: jnp.where(unseen_BS1, 1e9, x) for name, x in scales.items()}
    k, v = (x.at[:layer].set(SPOILT[stored]) for x in (k, v))
    scales = {name: x.at[:layer].set(jnp.nan) for name, x in scales.items()}
    run = jax.jit(
        lambda layer, *x, **scales: function(*x[:3], layer, *x[3:], softcap=case.softcap, **scales)
    )
    actual = run(jnp.int32(layer), q, k, v, jnp.asarray(until), jnp.asarray(since), **scales)
    assert actual.dtype == q.dtype
    assert not np.asarray(actual.astype(jnp.float32))[until <= since].any()
    testing.assert_accurate(actual.astype(jnp.float32), exact, plain, dtype)


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        *((name, "int8") for name in ("ragged", "group3_softcap", "d256")),
        ("group7", "fp8"),
        pytest.param("group7", "int8", marks=pytest.mark.thorough),
        *(
            pytest.param(name, "fp8", marks=pytest.mark.thorough)
            for name in ("ragged", "group3_softcap", "d256")
        ),
    ],
)
def test_kernel_matches_numpy(name, stored):
    case = next(case for case in CI if case.name == name)
    check(case, stored, "bfloat16", functools.partial(interpreted, gpu.Config(keys=32, part=24)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("stored", STORED)
def test_kernel_without_a_merge(stored, dtype):
    case = next(case for case in CI if case.name == "window")
    check(case, stored, dtype, functools.partial(interpreted, gpu.Config(keys=64, part=256)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("stored", STORED)
def test_other_backends_match_numpy(stored, dtype):
    for name in ("ragged", "group3_softcap"):
        case = next(case for case in CI if case.name == name)
        check(case, stored, dtype, functools.partial(decode_attention, impl="reference"))
    # Slots that nobody sees must hold finite numbers there.
    q, k, v, scales, until, since = arrays(case, stored, dtype)
    arguments = (q, k, v, 1, jnp.asarray(until), jnp.asarray(since))
    want, actual = (
        decode_attention(*arguments, **scales, impl=impl).astype(jnp.float32)
        for impl in ("reference", "xla")
    )
    # Both in float32, and rounded to q's dtype: its last place of numbers below 8.
    np.testing.assert_allclose(actual, want, rtol=0, atol=2**-5 if dtype == "bfloat16" else 1e-5)


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("size", [1e-12, 1e12])
def test_values_of_any_size_and_none(stored, size):
    """Every third value is 0, and with it its scale: it counts among the weights. Queries are far
    larger than float16 holds, keys as much smaller."""
    case = next(case for case in CI if case.name == "ragged")
    inputs, (until, since) = case.inputs(), case.interval()
    inputs["v"] = size * inputs["v"] * (np.arange(case.slots) % 3 > 0)[:, None, None]
    q = jnp.asarray(1e6 * inputs["q"], jnp.bfloat16)
    k, v = (store(jnp.asarray(x, jnp.float32), stored) for x in (1e-6 * inputs["k"], inputs["v"]))
    wide = [np.asarray(x[0][1], np.float64) * np.asarray(x[1][1])[..., None] for x in (k, v)]
    exact = numpy_decode_attention(q.astype(jnp.float32), *wide, until, since, case.head_dim**-0.5)
    actual = interpreted(
        gpu.Config(keys=32, part=32),
        *(q, k[0], v[0], 1, jnp.asarray(until), jnp.asarray(since)),
        **{"k_scale": k[1], "v_scale": v[1]},
    )
    # q, the weights and the result are each rounded to bfloat16 or finer.
    error = np.abs(np.asarray(actual, np.float64) - exact).max()
    assert error < 2**-6 * np.abs(exact).max()


def test_sinks_and_a_few_queries():
    case = next(case for case in CI if case.name == "ragged")
    _, k, v, scales, _, _ = arrays(case, "int8")
    rng = np.random.default_rng(3)
    q = jnp.asarray(rng.standard_normal((case.rows, 3, case.heads, case.head_dim)), jnp.float32)
    until = jnp.asarray(rng.integers(1, case.slots, (case.rows, 1)) + np.arange(3), jnp.int32)
    options = scales | {"sinks": jnp.linspace(-2, 2, case.heads)}
    kernel = functools.partial(interpreted, gpu.Config(keys=32, part=32))
    actual = kernel(q, k, v, 0, until, **options)
    want = decode_attention(q, k, v, 0, until, **options, impl="reference")
    # Sums of up to 96 terms of order 1 in another order, float32.
    np.testing.assert_allclose(actual, want, rtol=0, atol=1e-5)
    for t in range(3):
        alone = kernel(q[:, t], k, v, 0, until[:, t], **options)
        np.testing.assert_array_equal(actual[:, t], alone)


@pytest.mark.parametrize("stored", STORED)
def test_lowers_for_a_gpu_without_touching_the_cache(stored):
    """Codes and scales go into the kernel as they are stored."""
    from jax._src.mesh import AbstractDevice

    device = AbstractDevice("NVIDIA H200", 132, "gpu")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)
    q = jax.ShapeDtypeStruct((128, 16, 128), jnp.bfloat16)
    cache = jax.ShapeDtypeStruct((28, 128, 1280, 8, 128), STORED[stored][0])
    scale = jax.ShapeDtypeStruct(cache.shape[:-1], jnp.float32)
    layer, until = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((), (128,)))
    with jax.sharding.use_abstract_mesh(mesh), jax.numpy_dtype_promotion("strict"):
        traced = jax.jit(decode_attention).trace(
            q, cache, cache, layer, until, k_scale=scale, v_scale=scale
        )
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    touching = [line for line in text.splitlines() if "28x128x1280x8x" in line]
    assert len(touching) == 2  # main's arguments, and the kernel
    assert "triton" in touching[1]


def test_tiles_of_codes_are_as_many_bytes(monkeypatch):
    monkeypatch.setattr(gpu, "num_cores", lambda: 132)
    # What was fastest on an H200 of the benchmark's variants.
    assert gpu.heuristic(128, 1280, 8, 16, 128, 1) == gpu.Config(128, part=256, warps=4, stages=3)


def test_arguments_that_do_not_fit(monkeypatch):
    q, codes, until = jnp.ones((2, 4, 64)), jnp.ones((1, 2, 5, 2, 64), jnp.int8), jnp.ones(2, int)
    scale, until = jnp.ones((1, 2, 5, 2)), until.astype(jnp.int32)
    with pytest.raises(ValueError, match="of 8 bits come with k_scale.*v_scale None"):
        decode_attention(q, codes, codes, 0, until)
    with pytest.raises(ValueError, match="of 8 bits come with k_scale.*v_scale None"):
        decode_attention(q, codes, codes, 0, until, k_scale=scale)
    with pytest.raises(ValueError, match="others with neither; k is float32"):
        wide = codes.astype(jnp.float32)
        decode_attention(q, wide, wide, 0, until, k_scale=scale, v_scale=scale)
    with pytest.raises(
        ValueError, match=r"v_scale is float32\[1, 2, 5\]; want float32\[1, 2, 5, 2"
    ):
        decode_attention(q, codes, codes, 0, until, k_scale=scale, v_scale=scale[..., 0])
    monkeypatch.setattr(gpu, "require_nvidia", lambda: None)
    arguments = {"k_scale": scale, "v_scale": scale, "impl": "gpu"}
    with pytest.raises(NotImplementedError, match="queries in bfloat16, got float32"):
        decode_attention(q, codes, codes, 0, until, **arguments)
    q = q.astype(jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="needs compute capability 8.9, found 8.6"):
        fp8 = codes.astype(jnp.float8_e4m3fn)
        older = [types.SimpleNamespace(compute_capability="8.6")]
        monkeypatch.setattr(jax, "devices", lambda: older)
        decode_attention(q, fp8, fp8, 0, until, **arguments)
    with pytest.raises(NotImplementedError, match="got uint8"):
        odd = codes.astype(jnp.uint8)
        decode_attention(q, odd, odd, 0, until, **arguments)
