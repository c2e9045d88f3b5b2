"""The cuDNN route without cuDNN: what is around its two calls, and that they lower.

`emulate` stands in for the calls by their documentation: causal attention of each (start, length),
undefined (NaN) elsewhere.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtrain_kernels import Context, attention, cudnn, testing
from jaxtrain_kernels.tree_attention import cudnn as route
from test_kernels_tree_attention import ancestor_mask, numpy_attention, run


def causal(length, window):
    gap = np.arange(length)[:, None] - np.arange(length)[None]
    return ((gap >= 0) if window is None else (gap >= 0) & (gap < window))[None]


def logsumexp(q, k, mask, scale):
    """[N, L] of one document, float64."""
    q, k = (np.asarray(x, np.float64) for x in (q, k))
    score = np.einsum("tnh,snh->nts", q, np.repeat(k, q.shape[1] // k.shape[1], 1)) * scale
    return np.log((np.exp(score) * mask).sum(-1))


def cut(arrays, start, length):
    """The document's tokens of [B, T, N, H] arrays, as rows of a batch of one."""
    part = slice(int(start), int(start + length))
    return [np.asarray(x).reshape(-1, *x.shape[2:])[None, part] for x in arrays]


def paste(full, start, part):
    full.reshape(-1, *full.shape[2:])[int(start) : int(start) + part.shape[1]] = part[0]


def emulate_forward(q, k, v, starts, lengths, *, scale, window):
    B, T, N, _ = q.shape
    out, lse = np.full(q.shape, np.nan), np.full((len(starts), N, T), np.nan)
    for g, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        assert start == B * T if length == 0 else 1 < length <= T
        if length:
            local_copy, mask = cut((q, k, v), start, length), causal(length, window)
            paste(out, start, numpy_attention(*local_copy, local_copy[0], mask, scale=scale)[0])
            lse[g, :, :length] = logsumexp(local_copy[0][0], local_copy[1][0], mask, scale)
    return jnp.asarray(out, q.dtype), jnp.asarray(lse, jnp.float32)


def emulate_backward(q, k, v, starts, lengths, out, lse, d_out, *, scale, window):
    grads = [np.full(x.shape, np.nan) for x in (q, k, v)]
    for g, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        if length:
            *local_copy, o = cut((q, k, v, d_out, out), start, length)
            mask = causal(length, window)
            exact, *actual = numpy_attention(*local_copy, mask, scale=scale)
            # the output in bfloat16; statistics pass through as they were
            np.testing.assert_allclose(o.astype(np.float64), exact, rtol=0.01, atol=1e-3)
            s = logsumexp(local_copy[0][0], local_copy[1][0], mask, scale)
            np.testing.assert_allclose(lse[g, :, :length], s, rtol=1e-6, atol=1e-6)
            for grad, x in zip(grads, actual, strict=True):
                paste(grad, start, x)
    return tuple(jnp.asarray(g, jnp.bfloat16) for g in grads)


@pytest.fixture
def emulated(monkeypatch):
    monkeypatch.setattr(cudnn, "require_cudnn", lambda: None)
    monkeypatch.setattr(cudnn, "forward", emulate_forward)
    monkeypatch.setattr(cudnn, "backward", emulate_backward)


def inputs(rng, B, T, N=2, K=1, H=64):
    shapes = {"q": (B, T, N, H), "k": (B, T, K, H), "v": (B, T, K, H), "d_out": (B, T, N, H)}
    return {n: rng.standard_normal(shape) for n, shape in shapes.items()}


def rows_of(sizes, T):
    packed = [testing.pack(testing.documents(row), T) for row in sizes]
    mask = np.stack(
        [ancestor_mask(p["prev"], sum(row)) for p, row in zip(packed, sizes, strict=True)]
    )
    return {n: np.stack([p[n] for p in packed]) for n in ("until", "positions")}, mask


def check(sizes, T, *, window=None, documents=16, since=False, seed=0):
    rng = np.random.default_rng(seed)
    rows, mask = rows_of(sizes, T)
    positions = rows["positions"]
    if window is not None:
        mask &= positions[:, :, None] - positions[:, None] < window
    provided = inputs(rng, len(sizes), T)
    options = {"scale": 64**-0.5, "window": window, "documents": documents}
    positions, until = jnp.asarray(positions), jnp.asarray(rows["until"])
    context = Context(until, None, positions, positions)
    if since:
        first = jnp.tile(jnp.arange(T, dtype=jnp.int32), (len(sizes), 1))
        context = context._replace(since=first)

    def function(q, k, v):
        return route.attention(q, k, v, context, **options)

    def plain(q, k, v):
        return attention(q, k, v, context._replace(since=None), window=window, impl="reference")

    low = [np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64) for x in provided.values()]
    exact = numpy_attention(*low, mask)
    bar = run(*low, jnp.bfloat16, plain)
    actual = run(*low, jnp.bfloat16, function, jit=False)
    for name, a, e, b in zip(("out", "dq", "dk", "dv"), actual, exact, bar, strict=True):
        testing.assert_accurate(a, e, b, jnp.bfloat16, name)


@pytest.mark.parametrize(
    "sizes, options",
    [
        ([[12, 7, 3], [24], []], {}),  # padding, a full row, an empty row
        ([[5, 1, 1, 9, 2], [2, 2], [1]], {"documents": 4}),  # lone tokens; rounded up to 6
        ([[20, 4], [3, 3, 3, 3], [24]], {"window": 4}),
        ([[20, 4], [3, 3, 3, 3], [24]], {"since": True}),
    ],
)
def test_documents_match_the_definition(emulated, sizes, options):
    check(sizes, 24, **options)


@pytest.mark.parametrize("seed", range(20))
def test_documents_are_found(seed):
    """Starts and lengths of random rows, against a loop; lone tokens are left out."""
    rng = np.random.default_rng(seed)
    T, expected, sizes = 24, [], []
    for b in range(3):
        row, index = [], 0
        while index < T - 5:
            row.append(int(rng.integers(1, 6)))
            expected += [(b * T + index, row[-1])] if row[-1] > 1 else []
            index += row[-1]
        sizes.append(row)
    until = jnp.asarray(rows_of(sizes, T)[0]["until"])
    actual = jax.jit(route.find_documents, static_argnums=1)(until, 36)
    n = len(expected)
    np.testing.assert_array_equal(np.stack([actual.starts, actual.lengths], 1)[:n], expected)
    assert (actual.starts[n:] == 3 * T).all() and not actual.lengths[n:].any() and actual.ok
    held = np.zeros(3 * T, bool)
    for g, (start, length) in enumerate(expected):
        held[start : start + length] = True
        assert (actual.index.reshape(-1)[start : start + length] == g).all()
    np.testing.assert_array_equal(actual.held.reshape(-1), held)
    assert not jax.jit(route.find_documents, static_argnums=1)(until, n - 1).ok


@pytest.mark.parametrize("label", ["tree", "too many", "not causal", "positions", "hidden token"])
def test_what_is_no_documents_is_nan_never_wrong(monkeypatch, label):
    monkeypatch.setattr(cudnn, "require_cudnn", lambda: None)
    lse = jnp.zeros((4, 2, 24), jnp.float32)
    monkeypatch.setattr(cudnn, "forward", lambda q, k, v, *_, **__: (q, lse))
    monkeypatch.setattr(cudnn, "backward", lambda q, k, v, *_, **__: (q, k, v))
    T = 24
    provided = inputs(np.random.default_rng(0), 1, T)
    q, k, v = (jnp.asarray(provided[n], jnp.bfloat16) for n in "qkv")
    packed = testing.pack(testing.documents([8, 8, 8]), T)
    options, masks = {"scale": 1.0, "documents": 4}, {}
    if label == "tree":
        packed = testing.pack([(8, -1), (8, 0), (8, 0)], T)
    elif label == "too many":
        options["documents"] = 2
    elif label == "not causal":
        masks["since"] = jnp.zeros((1, T), jnp.int32)
    elif label == "positions":
        index = jnp.arange(T, dtype=jnp.int32)[None] * 2
        options["window"], masks = 5, {"positions": index, "key_positions": index}
    else:
        packed["until"][3] = 3
    context = Context(jnp.asarray(packed["until"])[None], **masks)
    out, pull = jax.vjp(lambda *a: route.attention(*a, context, **options), q, k, v)
    for x in (out, *pull(out)):
        assert np.isnan(np.asarray(x, np.float32)).all()


def test_declines_with_its_reason(monkeypatch):
    x, context = jnp.zeros((1, 24, 1, 64), jnp.bfloat16), Context(jnp.full((1, 24), 24, jnp.int32))
    if jax.default_backend() == "cpu":
        with pytest.raises(NotImplementedError, match="Hopper GPU|written for jax"):
            attention(x, x, x, context, impl="cudnn")
    monkeypatch.setattr(cudnn, "require_cudnn", lambda: None)
    for arrays, options, reason in [
        ([x.astype(jnp.float32)] * 3, {}, "takes bfloat16"),
        ([x[..., :6]] * 3, {}, "head dim 6"),
        ([x] * 3, {"softcap": 2.0}, "no softcap"),
        ([x[:, :5], x, x], {}, "5 queries on 24 keys"),
    ]:
        with pytest.raises(NotImplementedError, match=reason):
            attention(*arrays, context, impl="cudnn", **options)


def test_lowers_to_the_packed_calls(monkeypatch):
    if jax.__version_info__[:2] != (0, 11):
        pytest.skip(f"the calls are written for jax 0.11, found {jax.__version__}")
    monkeypatch.setattr(cudnn, "require_cudnn", lambda: None)
    heads = [jax.ShapeDtypeStruct((2, 512, n, 64), jnp.bfloat16) for n in (4, 2, 2)]
    until = jax.ShapeDtypeStruct((2, 512), jnp.int32)

    def loss(q, k, v, until):
        return attention(q, k, v, Context(until), impl="cudnn").astype(jnp.float32).sum()

    step = jax.jit(jax.grad(loss, (0, 1, 2))).trace(*heads, until)
    text = step.lower(lowering_platforms=("cuda",)).as_text()
    assert "fmhaSoftmax(" in text and "fmhaSoftmaxBackward(" in text
    assert text.count("max_seg_per_batch\\22: 2") == 2 and text.count("PADDING_CAUSAL") == 2
