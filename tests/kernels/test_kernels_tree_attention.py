"""Tree attention against a float64 numpy definition that walks ancestors instead of intervals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtrain_kernels import Context, attention, testing
from jaxtrain_kernels.tree_attention import xla
from jaxtrain_kernels.tree_attention.cases import CASES, DraftBlocks, UnrolledDraft

CI_CASES = [case for case in CASES if "ci" in case.tags]


def ancestor_mask(prev, tokens):
    """bool [T, T] by walking `prev`; rows and columns behind `tokens` (padding) see themselves."""
    mask = np.eye(len(prev), dtype=bool)
    for t in range(tokens):
        if prev[t] >= 0:
            mask[t] |= mask[prev[t]]
    return mask


def numpy_attention(q, k, v, d_out, mask, softcap=None, scale=None):
    """Output and dq, dk, dv by the textbook formulas, float64; mask [B, T, S]."""
    q, k, v, d_out = (np.asarray(x, np.float64) for x in (q, k, v, d_out))
    G = q.shape[2] // k.shape[2]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    keys, values = np.repeat(k, G, 2), np.repeat(v, G, 2)
    raw = np.einsum("btnh,bsnh->bnts", q, keys) * scale
    score = raw if softcap is None else softcap * np.tanh(raw / softcap)
    weight = np.exp(score - score.max(-1, keepdims=True)) * mask[:, None]
    total = weight.sum(-1, keepdims=True)
    weight = np.divide(weight, total, where=total > 0, out=np.zeros_like(weight))
    out = np.einsum("bnts,bsnh->btnh", weight, values)
    d_weight = np.einsum("btnh,bsnh->bnts", d_out, values)
    d_score = weight * (d_weight - (d_weight * weight).sum(-1, keepdims=True))
    if softcap is not None:
        d_score *= 1 - np.tanh(raw / softcap) ** 2
    dq = np.einsum("bnts,bsnh->btnh", d_score, keys) * scale
    dk = np.einsum("bnts,btnh->bsnh", d_score, q) * scale
    dv = np.einsum("bnts,btnh->bsnh", weight, d_out)
    dk, dv = (d.reshape(*x.shape[:3], G, x.shape[3]).sum(3) for d, x in ((dk, k), (dv, v)))
    return out, dq, dk, dv


def with_gradients(*functions, jit=True):
    """(q, k, v, d_out) -> outputs and gradients of every function, in one program."""

    def run(q, k, v, d_out):
        pairs = [jax.vjp(function, q, k, v) for function in functions]
        return [(out, *pull(d_out)) for out, pull in pairs]

    return jax.jit(run) if jit else run


def run(q, k, v, d_out, dtype, function, jit=True):
    """Output and gradients of `function(q, k, v)` in `dtype`."""
    return with_gradients(function, jit=jit)(*(jnp.asarray(x, dtype) for x in (q, k, v, d_out)))[0]


def compare(inputs, mask, dtype, function, plain, softcap=None, jit=True):
    """Output and gradients of `function` by the 2x rule; `plain` is the reference backend."""
    low = [jnp.asarray(inputs[n], dtype) for n in ("q", "k", "v", "d_out")]
    if jit:
        actual, bar = with_gradients(function, plain)(*low)
    else:
        (actual,), (bar,) = with_gradients(function, jit=False)(*low), with_gradients(plain)(*low)
    check(low, mask, dtype, actual, bar, softcap)


def check(low, mask, dtype, actual, bar, softcap=None):
    """Apply the 2x rule to outputs and gradients on the arrays `low`."""
    exact = numpy_attention(*(np.asarray(x, np.float64) for x in low), mask, softcap)
    for name, a, e, b in zip(("out", "dq", "dk", "dv"), actual, exact, bar, strict=True):
        assert a.dtype == dtype
        testing.assert_accurate(a, e, b, dtype, name)


def arguments(case, inputs):
    """The context and the options of a case."""
    positions = None if case.window is None else jnp.asarray(inputs["positions"])
    since = None if "since" not in inputs else jnp.asarray(inputs["since"])
    context = Context(jnp.asarray(inputs["until"]), since, positions, positions)
    return context, {"window": case.window, "softcap": case.softcap}


def case_mask(case, inputs):
    row = testing.pack(case.forest(), case.tokens)
    mask = ancestor_mask(row["prev"], sum(size for size, _ in case.forest()))
    if isinstance(case.layout, UnrolledDraft):
        mask = np.concatenate([mask] + [np.eye(len(mask), dtype=bool)] * case.layout.steps, 1)
    if isinstance(case.layout, DraftBlocks):
        anchors, size = case.layout.anchors(row), case.layout.size
        before = (mask & ~np.eye(len(mask), dtype=bool))[anchors].repeat(size, 0)
        blocks = np.kron(np.eye(len(anchors), dtype=bool), np.ones((size, size), bool))
        mask = np.concatenate([before, blocks], 1)
    if case.window is not None:
        depth = row["positions"]
        mask &= depth[:, None] - depth[None] < case.window
    return np.tile(mask, (case.rows, 1, 1))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CI_CASES, ids=lambda case: case.name)
def test_cases_match_the_ancestor_walk(case, dtype):
    inputs = case.inputs()
    context, options = arguments(case, inputs)
    compare(
        inputs,
        case_mask(case, inputs),
        jnp.dtype(dtype),
        lambda q, k, v: attention(q, k, v, context, impl="xla", **options),
        lambda q, k, v: attention(q, k, v, context, impl="reference", **options),
        case.softcap,
    )


BLOCKS = (7, 16, 64, 300)


@jax.jit
def run_blocks(q, k, v, d_out, until):
    """Outputs and gradients of the reference and of every block size."""
    context = Context(until)
    blocked = [
        functools.partial(xla.attention, context=context, scale=8**-0.5, block=block)
        for block in BLOCKS
    ]
    plain = functools.partial(attention, context=context, impl="reference")
    return with_gradients(plain, *blocked)(q, k, v, d_out)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_any_block_size_on_random_forests(seed):
    rng = np.random.default_rng(seed)
    T, used = 96, 96 - 11 * seed
    row = testing.pack(testing.random_forest(rng, used, mean=6), T)
    low = [jnp.asarray(rng.standard_normal((1, T, n, 8)), "float32") for n in (4, 2, 2, 4)]
    mask = ancestor_mask(row["prev"], used)[None]
    plain, *blocked = run_blocks(*low, jnp.asarray(row["until"])[None])
    for actual in blocked:
        check(low, mask, jnp.dtype("float32"), actual, plain)


@pytest.mark.parametrize("block", [None, 16])
def test_float64_is_float64_throughout(block):
    rng = np.random.default_rng(5)
    T = 48
    row = testing.pack(testing.random_forest(rng, T, mean=5), T)
    arrays = [rng.standard_normal((1, T, n, 8)) for n in (4, 2, 2, 4)]
    exact = numpy_attention(*arrays, ancestor_mask(row["prev"], T)[None], softcap=1.5)
    context = Context(jnp.asarray(row["until"])[None])
    options = {"softcap": 1.5, "scale": 8**-0.5, "block": block}
    with jax.enable_x64(True):
        actual = run(
            *arrays,
            jnp.float64,
            lambda q, k, v: xla.attention(q, k, v, context, **options),
        )
        for a, e in zip(actual, exact, strict=True):
            assert a.dtype == jnp.float64
            # Two orders of summation of at most 48 terms of order 1: a few hundred eps.
            np.testing.assert_allclose(np.asarray(a), e, rtol=0, atol=1e-13)


@pytest.mark.parametrize("impl", ["reference", "xla"])
@pytest.mark.parametrize("block", [None, 8])
def test_since_blocks_and_fewer_queries_than_keys(impl, block):
    """DFlash-like: bidirectional blocks of 4 behind a context that only some of them see."""
    rng = np.random.default_rng(1)
    B, T, S = 2, 24, 40
    since = np.tile(np.arange(S), (B, 1))
    until = np.full((B, S), T)
    since[:, :16] = np.sort(rng.integers(0, T, (B, 16)), 1)  # context, seen from some block on
    start = (np.arange(T) // 4) * 4
    since[:, 16:], until[:, 16:] = start, start + 4
    rows = np.arange(T)[None, :, None]
    mask = (since[:, None] <= rows) & (rows < until[:, None])
    shapes = {"q": (B, T, 4, 8), "k": (B, S, 2, 8), "v": (B, S, 2, 8), "d_out": (B, T, 4, 8)}
    inputs = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    context = Context(jnp.asarray(until, jnp.int32), jnp.asarray(since, jnp.int32))

    def function(q, k, v):
        if impl == "xla" and block:
            return xla.attention(q, k, v, context, scale=8**-0.5, block=block)
        return attention(q, k, v, context, impl=impl)

    compare(inputs, mask, jnp.dtype("float32"), function, function)
    # The rule above compares `reference` with itself; in float32, 1e-5 is ~100 eps of sums here.
    low = [np.asarray(inputs[n], np.float32) for n in ("q", "k", "v", "d_out")]
    exact = numpy_attention(*low, mask)
    for a, e in zip(run(*low, jnp.float32, function), exact, strict=True):
        np.testing.assert_allclose(np.asarray(a), e, rtol=0, atol=1e-5)


@pytest.mark.parametrize("impl", ["reference", "xla"])
@pytest.mark.parametrize("keys_at", ["ahead", "behind"])
def test_window_with_own_key_positions(impl, keys_at):
    rng = np.random.default_rng(2)
    T, S = 12, 20
    positions = np.arange(T, dtype=np.int32)[None] + 5
    key_positions = np.arange(S, dtype=np.int32)[None] - (3 if keys_at == "behind" else -2)
    until, since = np.full((1, S), T, np.int32), np.zeros((1, S), np.int32)
    mask = (positions[:, :, None] - key_positions[:, None] < 6) & np.ones((1, T, S), bool)
    arrays = [rng.standard_normal(s) for s in [(1, T, 2, 8), (1, S, 1, 8)]]
    q, k, v, d_out = arrays[0], arrays[1], arrays[1][:, ::-1], arrays[0][:, ::-1]
    exact = numpy_attention(q, k, v, d_out, mask)
    context = Context(*map(jnp.asarray, (until, since, positions, key_positions)))

    def function(q, k, v):
        return attention(q, k, v, context, window=6, impl=impl)

    actual = run(q, k, v, d_out, jnp.float32, function)
    for a, e in zip(actual, exact, strict=True):
        # float32 sums of 20 terms of order 1
        np.testing.assert_allclose(np.asarray(a), e, rtol=0, atol=1e-5)


@pytest.mark.parametrize("impl", ["reference", "xla"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_that_see_nothing_are_zero(impl, dtype):
    """Empty intervals (until = index): output 0, and no gradient anywhere, for large inputs too."""
    rng = np.random.default_rng(3)
    T, seen = 32, 20
    until = np.where(np.arange(T) < seen, seen, np.arange(T)).astype(np.int32)[None]
    q, k, v, d_out = (rng.standard_normal((1, T, n, 8)) * 4 for n in (2, 1, 1, 2))
    context = Context(jnp.asarray(until))
    out, dq, dk, dv = run(
        q, k, v, d_out, jnp.dtype(dtype), lambda *a: attention(*a, context, impl=impl)
    )
    for name, x in {"out": out, "dq": dq, "dk": dk, "dv": dv}.items():
        assert np.isfinite(np.asarray(x, np.float32)).all(), name
        assert not np.asarray(x, np.float32)[:, seen:].any(), name
        assert np.asarray(x, np.float32)[:, :seen].any(), name


@pytest.mark.parametrize("impl", ["reference", "xla"])
def test_values_of_another_width(impl):
    """Compare with columns of values as wide as the keys, and with gradients of those columns."""
    rng = np.random.default_rng(5)
    T, H, V = 40, 12, 8
    context = Context(jnp.asarray(testing.pack(testing.random_forest(rng, T, 5), T)["until"])[None])
    q, k, v, d_out = (rng.standard_normal((1, T, n, H)) for n in (4, 2, 2, 4))
    d_out[..., V:] = 0
    wide = run(q, k, v, d_out, jnp.float32, lambda *a: attention(*a, context, impl="reference"))
    narrow = run(
        *(q, k, v[..., :V], d_out[..., :V], jnp.float32),
        lambda *a: attention(*a, context, impl=impl),
    )
    for name, x, y in zip(("out", "dq", "dk", "dv"), wide, narrow, strict=True):
        # float32 sums of 40 terms of order 1
        expected = np.asarray(x)[..., : y.shape[-1]]
        np.testing.assert_allclose(np.asarray(y), expected, rtol=0, atol=2e-5, err_msg=name)


def test_a_packed_tree_equals_its_branches():
    """Each root-to-leaf path alone through plain causal attention; gradients summed over leaves."""
    rng = np.random.default_rng(4)
    T = 40
    nodes = testing.random_forest(rng, T, mean=5)
    row = testing.pack(nodes, T)
    q, k, v = (jnp.asarray(rng.standard_normal((1, T, 2, 8)), jnp.float32) for _ in range(3))
    packed = jax.jit(attention)(q, k, v, Context(jnp.asarray(row["until"])[None]))
    has_child = np.zeros(T, bool)
    has_child[row["prev"][row["prev"] >= 0]] = True

    @jax.jit
    def alone(q, k, v, until):
        return attention(q, k, v, Context(until), impl="reference")

    for leaf in np.flatnonzero(~has_child):
        path = [leaf]
        while row["prev"][path[-1]] >= 0:
            path.append(row["prev"][path[-1]])
        path, count = np.array(path[::-1]), len(path)
        padded = np.pad(path, (0, T - count))  # one length, so one program; nothing sees padding
        until = jnp.where(jnp.arange(T) < count, count, 0)[None].astype(jnp.int32)
        out = alone(q[:, padded], k[:, padded], v[:, padded], until)[:, :count]
        # Same sums in another order, float32.
        np.testing.assert_allclose(packed[:, path], out, rtol=0, atol=2e-6)


def test_plan_covers_every_visible_pair():
    rng = np.random.default_rng(6)
    for _ in range(200):
        T, S, block = (int(x) for x in rng.integers(1, 200, 3))
        for causal in (True, False):
            rows = 0
            for stripe in xla.plan(T, S, min(block, T), causal):
                assert stripe.first == rows
                rows += stripe.blocks * stripe.size
                assert stripe.keys == S or (causal and stripe.keys >= min(rows, S))
            assert rows == T


def test_no_square_scores_in_memory():
    """8,192 tokens, 16 heads: the compiled program's temporaries stay far below [N, T, T]."""
    T, N = 8192, 16
    shape = jax.ShapeDtypeStruct((1, T, N, 64), jnp.bfloat16)
    kv = jax.ShapeDtypeStruct((1, T, 8, 64), jnp.bfloat16)
    until = jax.ShapeDtypeStruct((1, T), jnp.int32)

    def loss(q, k, v, until):
        return attention(q, k, v, Context(until), impl="xla").astype(jnp.float32).sum()

    compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(shape, kv, kv, until).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < N * T * T * 4 / 3


@pytest.mark.parametrize(
    "change, message",
    [
        ({"v": (1, 7, 1, 8)}, "want .B, T, N, H., .B, S, K, H. and .B, S, K, V."),
        ({"k": (1, 8, 3, 8), "v": (1, 8, 3, 8)}, "N a multiple of K"),
        ({"until": (1, 9)}, r"until is int32\[1, 9\]; want int32\[1, 8\]"),
        ({"window": 4}, "window needs positions"),
    ],
)
def test_shapes_that_do_not_fit(change, message):
    arguments = {"q": (1, 8, 2, 8), "k": (1, 8, 1, 8), "v": (1, 8, 1, 8), "until": (1, 8)} | change
    window = arguments.pop("window", None)
    context = Context(jnp.zeros(arguments.pop("until"), jnp.int32))
    arrays = [jnp.zeros(shape) for shape in arguments.values()]
    with pytest.raises(ValueError, match=message):
        attention(*arrays, context, window=window)
