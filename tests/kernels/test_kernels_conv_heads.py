"""The convolution before linear attention, fused with what follows it: branch by branch in float64,
its kernels interpreted, jumps in any forest."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtrain_kernels import conv_heads, testing
from jaxtrain_kernels.conv_heads import cases, gpu
from jaxtrain_kernels.recurrence import gpu_conv
from jaxtrain_kernels.recurrence.conv import causal_conv
from jaxtrain_kernels.recurrence.hops import find_hops

CASES = {case.name: case for case in cases.CASES if "ci" in case.tags}
TAPS, K = 4, 64


def draw(name: str = "tree", dtype="float32"):
    """x, w and cotangents of q, k, v of two rows, the second of which is one document; prev."""
    actual = [CASES[name].inputs(seed) for seed in range(2)]
    arrays = {n: np.concatenate([row[n] for row in actual]) for n in actual[0] if n != "w"}
    T = arrays["prev"].shape[1]
    arrays["prev"][1] = testing.pack(testing.documents([T - 3]), T)["prev"]
    x, *d_outs = (jnp.asarray(arrays[n], dtype) for n in ("x", "d_q", "d_k", "d_v"))
    return x, jnp.asarray(actual[0]["w"]), tuple(d_outs), jnp.asarray(arrays["prev"])


def with_gradients(function):
    """(x, w, d_outs, prev) -> (q, k, v, dx, dw) in float64."""

    @jax.jit
    def compiled(x, w, d_outs, prev):
        actual, pull = jax.vjp(lambda x, w: function(x, w, prev), x, w)
        return (*actual, *pull(d_outs))

    def run(*arguments):
        return [np.asarray(y, np.float64) for y in compiled(*arguments)]

    return run


def plain(x, w, prev):
    """Token by token in numpy."""
    x = x[..., : w[..., 0].size].reshape(*prev.shape, *w.shape[:2])
    y = np.zeros(x.shape)
    for row, token in np.ndindex(*prev.shape):
        start = token
        for j in range(TAPS):
            if start < 0:
                break
            y[row, token] += x[row, start] * w[..., TAPS - 1 - j]
            start = prev[row, start]
    y = y / (1 + np.exp(-y))
    q, k, v = y[..., :K], y[..., K : 2 * K], y[..., 2 * K :].reshape(*prev.shape, -1, K)
    q, k = (z / np.sqrt((z * z).sum(-1, keepdims=True) + 1e-6) for z in (q, k))
    return q * K**-0.5, k, v


@pytest.mark.parametrize("impl", ["xla", "reference"])
def test_each_token_follows_its_branch(impl):
    x, w, _, prev = draw("short_nodes")
    x, w = (np.asarray(y, np.float64) for y in (x, w))
    with jax.enable_x64(True):
        actual = conv_heads(jnp.asarray(x), jnp.asarray(w), K, K, prev, impl=impl)
    for a, b in zip(actual, plain(x, w, np.asarray(prev)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-13)


def by_kernels(x, w, prev):
    """`conv_heads` by its kernels, interpreted."""
    parts = gpu.ColumnParts(K, w.shape[1], TAPS, 1e-6, gpu.Config())
    return gpu.run(parts, x, w, K, find_hops(prev, TAPS), interpret=True)


def by_xla(x, w, prev):
    return conv_heads(x, w, key_dim=K, value_dim=K, prev=prev, impl="xla")


RUN_KERNELS, RUN_XLA = with_gradients(by_kernels), with_gradients(by_xla)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CASES)
def test_the_kernels(name, dtype):
    """Interpreted, by the 2x rule."""
    x, w, d_outs, prev = draw(name, dtype)
    arguments = (x, w, d_outs, prev)
    local, low = RUN_KERNELS(*arguments), RUN_XLA(*arguments)
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(y, np.float64)) for y in (x, w, *d_outs)]
        exact = RUN_XLA(*wide[:2], tuple(wide[2:]), prev)
    for label, a, b, c in zip(("q", "k", "v", "dx", "dw"), local, low, exact, strict=True):
        assert np.isfinite(a).all(), label
        least = np.finfo(np.float32).eps * abs(c).max()
        assert abs(a - c).max() <= 2 * abs(b - c).max() + 4 * least, label


@jax.jit
def run_convolutions(x, w, dy, prev):
    """(outputs and gradients of the kernel's convolution, those of XLA's scatters)."""
    hops = find_hops(prev, 3)
    local, pull = jax.vjp(lambda x, w: gpu_conv.convolve(True, x, w, hops), x, w)
    expected, pull_expected = jax.vjp(lambda x, w: causal_conv(x, w, prev), x, w)
    return (local, *pull(dy)), (expected, *pull_expected(dy))


@pytest.mark.parametrize("name", CASES)
def test_the_gradient_of_any_convolution(name):
    """A width that no block divides, and 3 taps: beside XLA's scatters, in float32."""
    rng = np.random.default_rng(1)
    prev = draw(name)[-1]
    x, dy = (jnp.asarray(rng.standard_normal((*prev.shape, 72), np.float32)) for _ in range(2))
    w = jnp.asarray(rng.standard_normal((72, 3), np.float32))
    for a, b in zip(*run_convolutions(x, w, dy, prev), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-5)


def test_jumps_are_all_reads_that_are_not_right_before():
    prev = np.asarray(draw("short_nodes")[-1])
    T = prev.shape[1]
    hops = jax.tree.map(np.asarray, find_hops(jnp.asarray(prev), TAPS))
    for row in range(2):
        expected = []
        for token in range(T):
            index = token
            for j in range(1, TAPS):
                index = prev[row, index] if index >= 0 else -1
                assert hops.back[row, j - 1, token] == index
                if 0 <= index != token - j:
                    expected.append((index, token * (TAPS - 1) + j - 1))
        count = len(expected)
        actual = zip(hops.target[row, :count], hops.source[row, :count], strict=True)
        assert sorted(expected) == list(actual) and (hops.target[row, count:] == T).all()
        tiles = hops.target[row, :count] // gpu_conv.TILE
        for tile, (start, end) in enumerate(
            zip(hops.first[row], hops.first[row, 1:], strict=False)
        ):
            assert (tiles[start:end] == tile).all() and end - start == (tiles == tile).sum()


def test_what_the_kernels_decline(monkeypatch):
    x, w, _, prev = draw()
    with pytest.raises(NotImplementedError, match="needs an NVIDIA GPU"):
        conv_heads(x, w, K, K, prev, impl="gpu")
    monkeypatch.setattr(gpu, "require_nvidia", lambda: None)
    with pytest.raises(NotImplementedError, match="packed rows of at least 256 tokens"):
        conv_heads(x, w, K, K, prev, impl="gpu")
    longer = jnp.tile(x, (1, 2, 1))
    with pytest.raises(NotImplementedError, match="not cut into parts of 32"):
        conv_heads(longer, w, 32, 32, jnp.tile(prev, (1, 2)), impl="gpu")
    with pytest.raises(ValueError, match="whole heads of 48"):
        conv_heads(x, w, K, 48, prev)


def test_strict_modes():
    """Traced only: no dtype and no rank is promoted on the quiet."""
    x, w, _, prev = draw(dtype="bfloat16")
    run = functools.partial(conv_heads, key_dim=K, value_dim=K)
    calls = (
        lambda x, w: run(x, w, prev=prev),
        lambda x, w: run(x, w, tail=jnp.ones((2, 3, *w.shape[:2]), x.dtype)),
        lambda x, w: by_kernels(x, w, prev),
    )
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        for call in calls:
            loss = lambda x, w, call=call: sum(y.astype("float32").sum() for y in call(x, w))  # noqa: E731
            actual = jax.eval_shape(jax.grad(loss, (0, 1)), x, w)
            assert [y.dtype for y in actual] == [x.dtype, w.dtype]
