"""decode_attention against float64 numpy; the GPU kernel interpreted and lowered."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtrain_kernels import decode_attention, testing
from jaxtrain_kernels.decode_attention import gpu
from jaxtrain_kernels.decode_attention.cases import CASES

CI = [case for case in CASES if "ci" in case.tags]
SELECTED = [
    pytest.param(
        case,
        id=case.name,
        marks=[pytest.mark.thorough] * (case.name in ("one_head", "group16", "d128")),
    )
    for case in CI
]
LAYER = 0


def numpy_decode_attention(q, k, v, until, since, scale, softcap=None):
    """Attention of one layer, k and v [B, S, K, H], in float64: a softmax over the slots that each
    row sees."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = np.zeros_like(q)
    groups = q.shape[1] // k.shape[2]
    for row, (first, stop) in enumerate(zip(since, until, strict=True)):
        for head in range(q.shape[1]) if stop > first else ():
            score = k[row, first:stop, head // groups] @ q[row, head] * scale
            if softcap is not None:
                score = softcap * np.tanh(score / softcap)
            weight = np.exp(score - score.max())
            out[row, head] = weight @ v[row, first:stop, head // groups] / weight.sum()
    return out


def interpreted(config, q, k, v, layer, until, since=None, *, scale=None, softcap=None, **options):
    """The GPU kernel on the CPU."""
    few = q.ndim == 4
    actual = gpu.run(
        config,
        q if few else q[:, None],
        k,
        v,
        jnp.asarray(layer, jnp.int32),
        *(x if few or x is None else x[:, None] for x in (until, since)),
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        softcap=softcap,
        interpret=True,
        **options,
    )
    return actual.reshape(q.shape)


def arrays(case, dtype):
    inputs = case.inputs()
    q, k, v = (jnp.asarray(inputs[name], dtype) for name in ("q", "k", "v"))
    until, since = case.interval()
    return q, k, v, until, since


def check(case, dtype, function, spoil=None):
    """`function` with the layer traced, against numpy and the reference in `dtype` maths."""
    q, k, v, until, since = arrays(case, dtype)
    options = {"softcap": case.softcap}
    layer = case.layers - 1
    exact_of = [np.asarray(x.astype(jnp.float32)) for x in (q, k[layer], v[layer])]
    exact = numpy_decode_attention(*exact_of, until, since, case.head_dim**-0.5, case.softcap)
    plain = plainly(q, k[layer], v[layer], until, since, case.softcap)
    if spoil is not None:
        slots = np.arange(case.slots)
        unseen = (slots < since[:, None]) | (slots >= until[:, None])
        k, v = (jnp.where(unseen[None, :, :, None, None], spoil, x).astype(dtype) for x in (k, v))
        k, v = (x.at[:layer].set(spoil) for x in (k, v))
    run = jax.jit(lambda layer, *x: function(*x[:3], layer, *x[3:], **options))
    actual = run(jnp.int32(layer), q, k, v, jnp.asarray(until), jnp.asarray(since))
    assert actual.dtype == q.dtype
    assert not np.asarray(actual.astype(jnp.float32))[until <= since].any()
    testing.assert_accurate(actual.astype(jnp.float32), exact, plain, dtype)


def plainly(q, k, v, until, since, softcap):
    """Compute in the arrays' dtype, with weights rounded to it before the second product."""
    groups = q.shape[1] // k.shape[2]
    k, v = (jnp.repeat(x, groups, axis=2) for x in (k, v))
    score = jnp.einsum("bnh,bsnh->bns", q, k) * jnp.asarray(q.shape[-1] ** -0.5, q.dtype)
    if softcap is not None:
        score = jnp.tanh(score / jnp.asarray(softcap, q.dtype)) * jnp.asarray(softcap, q.dtype)
    slots = np.arange(k.shape[1])
    seen = ((slots >= since[:, None]) & (slots < until[:, None]))[:, None]
    weight = jnp.where(seen, jax.nn.softmax(jnp.where(seen, score, -jnp.inf), -1), 0)
    return jnp.einsum("bns,bsnh->bnh", weight, v).astype(jnp.float32)


@pytest.mark.parametrize("case", SELECTED)
def test_cases_match_numpy(case):
    check(case, "float32", functools.partial(decode_attention, impl="reference"))
    check(case, "bfloat16", functools.partial(decode_attention, impl="xla"))


def test_low_and_high_precision_of_both():
    case = next(case for case in CI if case.name == "ragged")
    check(case, "bfloat16", functools.partial(decode_attention, impl="reference"))
    check(case, "float32", functools.partial(decode_attention, impl="xla"))


@pytest.mark.parametrize("case", SELECTED)
def test_kernel_matches_numpy(case):
    """In parts; slots that nobody sees and other layers hold NaN: they must not be used."""
    kernel = functools.partial(interpreted, gpu.Config(keys=32, part=24))
    check(case, "bfloat16", kernel, spoil=jnp.nan)


@pytest.mark.parametrize("name", ["ragged", "window"])
def test_kernel_without_a_merge(name):
    case = next(case for case in CI if case.name == name)
    check(case, "float32", functools.partial(interpreted, gpu.Config(keys=64, part=256)), jnp.nan)


@pytest.mark.parametrize("impl", ["reference", "xla"])
def test_float64_is_float64_throughout(impl):
    case = next(case for case in CI if case.name == "group3_softcap")
    inputs, (until, since) = case.inputs(), case.interval()
    q, k, v = (inputs[name].astype(np.float64) for name in ("q", "k", "v"))
    exact = numpy_decode_attention(q, k[1], v[1], until, since, 0.25, case.softcap)
    with jax.enable_x64(True):
        arguments = (*map(jnp.asarray, (q, k, v)), 1, jnp.asarray(until), jnp.asarray(since))
        actual = decode_attention(*arguments, scale=0.25, softcap=case.softcap, impl=impl)
        assert actual.dtype == jnp.float64
        # Sums of 70 terms of order 1 in another order: some 100 eps.
        np.testing.assert_allclose(np.asarray(actual), exact, rtol=0, atol=1e-13)


def test_float32_queries_of_a_bfloat16_cache():
    """Case of a sampler that computes in float32 with a half-size cache."""
    case = next(case for case in CI if case.name == "ragged")
    q, k, v, until, since = arrays(case, "bfloat16")
    until, since = jnp.asarray(until), jnp.asarray(since)
    want = decode_attention(q, k, v, 1, until, since, impl="reference").astype(jnp.float32)
    wide = q.astype(jnp.float32)
    config = gpu.Config(keys=32, part=32)
    kernels = {
        "reference": functools.partial(decode_attention, impl="reference"),
        "xla": functools.partial(decode_attention, impl="xla"),
        "gpu": functools.partial(interpreted, config),
    }
    for name, kernel in kernels.items():
        actual = kernel(wide, k, v, 1, until, since)
        assert actual.dtype == jnp.float32
        # Results of order 1, rounded to bfloat16 on one side, as the weights were: 2 roundings.
        np.testing.assert_allclose(actual, want, rtol=0, atol=2**-7, err_msg=name)


def test_intervals_end_with_the_cache():
    case = next(case for case in CI if case.name == "ragged")
    q, k, v, _, _ = arrays(case, "float32")
    inside = (jnp.full(case.rows, case.slots, jnp.int32), jnp.zeros(case.rows, jnp.int32))
    beyond = (inside[0] + 3, inside[1] - 2)
    for kernel in (
        functools.partial(decode_attention, impl="reference"),
        functools.partial(decode_attention, impl="xla"),
        functools.partial(interpreted, gpu.Config(keys=32, part=32)),
    ):
        np.testing.assert_array_equal(kernel(q, k, v, 0, *inside), kernel(q, k, v, 0, *beyond))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_strict_promotion(dtype):
    case = next(case for case in CI if case.name == "group3_softcap")
    arguments = arrays(case, dtype)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        for kernel in (
            functools.partial(decode_attention, impl="reference"),
            functools.partial(decode_attention, impl="xla"),
            functools.partial(interpreted, gpu.Config(keys=32, part=64)),
        ):
            out = jax.eval_shape(
                lambda q, k, v, *x, f=kernel: f(q, k, v, 1, *x, softcap=2.0), *arguments
            )
            assert out.dtype == jnp.dtype(dtype)


def test_a_few_queries_are_each_as_alone():
    """Guesses that are checked against a cache; the first row's end before its last query's."""
    case = next(case for case in CI if case.name == "ragged")
    _, k, v, _, _ = arrays(case, "float32")
    rng = np.random.default_rng(3)
    q = jnp.asarray(rng.standard_normal((case.rows, 3, case.heads, case.head_dim)), jnp.float32)
    until = jnp.asarray(rng.integers(0, case.slots, (case.rows, 1)) + np.arange(3), jnp.int32)
    until = until.at[0, 2].set(0)
    since = jnp.maximum(until - 40, 0)
    for name, kernel in {
        "reference": functools.partial(decode_attention, impl="reference"),
        "xla": functools.partial(decode_attention, impl="xla"),
        "gpu": functools.partial(interpreted, gpu.Config(keys=32, part=32)),
    }.items():
        actual = kernel(q, k, v, 0, until, since)
        for t in range(3):
            alone = kernel(q[:, t], k, v, 0, until[:, t], since[:, t])
            if name == "gpu":
                np.testing.assert_array_equal(actual[:, t], alone)
            else:  # sums of up to 40 terms of order 1 in another order, float32
                np.testing.assert_allclose(actual[:, t], alone, rtol=0, atol=2e-6, err_msg=name)
        assert not actual[0, 2].any()


@pytest.mark.parametrize(
    ("part", "queries"),
    [
        (24, 3),
        (256, 1),
        *(pytest.param(*q, marks=pytest.mark.thorough) for q in [(24, 1), (256, 3)]),
    ],
)
def test_what_rows_share_is_read_from_the_leader(part, queries):
    """With fully shared tiles, a row's own slots are never read, and the bits stay the same."""
    case = next(case for case in CI if case.name == "d128")
    q, k, v, until, _ = arrays(case, "float32")
    q = jnp.stack([q * (t + 1) for t in range(queries)], 1)
    until = jnp.asarray(np.maximum(until[:, None] - np.arange(queries), 0), jnp.int32)
    leader, shared = jnp.array([1, 1, 2], jnp.int32), jnp.array([53, 70, 0], jnp.int32)
    k, v = (x.at[:, 0, :53].set(x[:, 1, :53]) for x in (k, v))
    sharing = {"leader": leader, "shared": shared}
    kernel = functools.partial(interpreted, gpu.Config(keys=32, part=part))  # tiles of 4 slots
    alone = kernel(q, k, v, 1, until)
    np.testing.assert_array_equal(kernel(q, k, v, 1, until, **sharing), alone)
    spoilt = [x.at[:, 0, :52].set(jnp.nan) for x in (k, v)]
    np.testing.assert_array_equal(kernel(q, *spoilt, 1, until, **sharing), alone)
    far = [x.at[:, 1, 53:].set(jnp.nan) for x in (k, v)]
    np.testing.assert_array_equal(kernel(q, *far, 1, until, **sharing)[0], alone[0])
    for impl in ("xla", "reference"):
        actual = decode_attention(q, k, v, 1, until, impl=impl, **sharing)
        np.testing.assert_array_equal(actual, decode_attention(q, k, v, 1, until, impl=impl))
    with pytest.raises(ValueError, match="come together"):
        decode_attention(q, k, v, 1, until, leader=leader)
    with pytest.raises(ValueError, match=r"shared is int32\[2\]; want int32\[3\]"):
        decode_attention(q, k, v, 1, until, leader=leader, shared=shared[:2])


def test_no_window_is_a_window_from_0():
    case = next(case for case in CI if case.name == "ragged")
    q, k, v, until, _ = arrays(case, "float32")
    until = jnp.asarray(until)
    for kernel in (
        functools.partial(decode_attention, impl="reference"),
        functools.partial(decode_attention, impl="xla"),
        functools.partial(interpreted, gpu.Config(keys=32, part=32)),
    ):
        alone = kernel(q, k, v, 0, until)
        arguments = kernel(q, k, v, 0, until, jnp.zeros_like(until))
        np.testing.assert_array_equal(alone, arguments)


@pytest.mark.parametrize(
    "sizes, together",
    [
        ((8, 16), 8),
        ((8, 32), 4),
        ((8, 8), 8),
        ((4, 28), 2),
        ((6, 18), 2),
        ((2, 32), 1),
        ((3, 3), 1),
    ],
)
def test_heads_together_fill_the_smallest_matmul(sizes, together):
    assert gpu.heads_together(*sizes) == together


def test_parts_fill_the_device(monkeypatch):
    monkeypatch.setattr(gpu, "num_cores", lambda: 132)
    # What was fastest on an H200 of the benchmark's variants.
    assert gpu.heuristic(128, 1280, 8, 16, 128) == gpu.Config(64, part=512, warps=4, stages=3)
    assert gpu.heuristic(16, 8192, 8, 16, 128) == gpu.Config(64, part=256, warps=4, stages=3)
    few = gpu.heuristic(1, 8192, 8, 16, 128)
    assert few.part == 64  # one row: as many parts as are worth a program
    many = gpu.heuristic(2048, 1024, 8, 16, 128)
    assert many.part >= 1024  # no merging where rows alone fill the device
    assert gpu.heuristic(128, 1280, 8, 16, 256, 4).keys == 16


@pytest.mark.parametrize("name", ["NVIDIA H200", "NVIDIA A100-SXM4-80GB"])
def test_lowers_for_a_gpu_without_touching_the_cache(name):
    """The whole cache goes into the kernel: nothing slices, converts or copies it before."""
    from jax._src.mesh import AbstractDevice

    mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=AbstractDevice(name, 132, "gpu"))
    q = jax.ShapeDtypeStruct((128, 16, 128), jnp.bfloat16)
    cache = jax.ShapeDtypeStruct((28, 128, 1280, 8, 128), jnp.bfloat16)
    layer, until = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((), (128,)))
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(decode_attention).trace(q, cache, cache, layer, until)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    touching = [line for line in text.splitlines() if "28x128x1280x8x128" in line]
    assert "decode_attention_merge" in text
    assert len(touching) == 2  # main's arguments, and the kernel
    assert "triton" in touching[1]


@pytest.mark.parametrize(
    "head_dim, heads, dtype, reason",
    [
        (96, 2, jnp.bfloat16, "head dim 96 is none of"),
        (64, 2, jnp.float16, "takes caches in bfloat16 or float32"),
        (64, 34, jnp.bfloat16, "17 query heads share a key"),
    ],
)
def test_declines(monkeypatch, head_dim, heads, dtype, reason):
    monkeypatch.setattr(gpu, "require_nvidia", lambda: None)
    q, cache = jnp.ones((2, heads, head_dim), dtype), jnp.ones((1, 2, 8, 2, head_dim), dtype)
    until = jnp.full(2, 8, jnp.int32)
    with pytest.raises(NotImplementedError, match=reason):
        decode_attention(q, cache, cache, 0, until, impl="gpu")
    assert decode_attention(q, cache, cache, 0, until).shape == q.shape  # the next one takes it


def test_declines_other_devices():
    q, cache, until = jnp.ones((1, 1, 64)), jnp.ones((1, 1, 8, 1, 64)), jnp.ones(1, jnp.int32)
    with pytest.raises(NotImplementedError, match="needs an NVIDIA GPU"):
        decode_attention(q, cache, cache, 0, until, impl="gpu")


def test_arguments_that_do_not_fit():
    q, cache, until = jnp.ones((2, 4, 8)), jnp.ones((1, 2, 5, 2, 8)), jnp.ones(2, jnp.int32)
    with pytest.raises(ValueError, match="want .B, N, H. or .B, T, N, H. and twice"):
        decode_attention(q, cache[0], cache[0], 0, until)
    with pytest.raises(ValueError, match="want .B, N, H. or .B, T, N, H. and twice"):
        decode_attention(q[:, :3], cache, cache, 0, until)
    with pytest.raises(ValueError, match=r"until is int32\[1\]; want int32\[2\]"):
        decode_attention(q, cache, cache, 0, until[:1])
    with pytest.raises(ValueError, match=r"since is float32"):
        decode_attention(q, cache, cache, 0, until, jnp.ones(2))
