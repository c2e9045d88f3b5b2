"""Sums in int32 of the fused backward: bounds hold, order is nothing, errors are not hidden."""

import jax.numpy as jnp
import numpy as np
import pytest
from jaxtrain_kernels.tree_attention import fixed_point
from jaxtrain_kernels.tree_attention.fixed_point import Scales


def problem(seed, T=96, S=160, N=4, K=2, H=16, sharp=1.0):
    """Arrays of one dense attention in float64, with keys whose columns differ by e^8, and its dQ
    as parts of 32 keys: float64 [S / 32, T, N, H]."""
    rng = np.random.default_rng(seed)
    q, d_out = rng.standard_normal((2, T, N, H))
    k, v = rng.standard_normal((2, S, K, H))
    sizes = np.exp(rng.uniform(-4, 4, H))
    k, q = k * sizes, q / sizes
    d_out *= np.exp(3 * rng.standard_normal((T, 1, 1)))
    k_all, v_all = (np.repeat(x, N // K, axis=1) for x in (k, v))
    scores = sharp * np.einsum("tnh,snh->nts", q, k_all)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out = np.einsum("nts,snh->tnh", weights, v_all)
    delta = (d_out * out).sum(-1)
    d_scores = weights * (np.einsum("tnh,snh->nts", d_out, v_all) - delta.T[:, :, None])
    d_scores = d_scores.reshape(N, T, S // 32, 32)
    parts = np.einsum("ntbs,bsnh->btnh", d_scores, k_all.reshape(S // 32, 32, N, H))
    arrays = {"k": k, "v": v, "d_out": d_out, "delta": delta.T}
    return {n: jnp.asarray(x[None], jnp.float32) for n, x in arrays.items()}, parts


def find_scales(arrays) -> Scales:
    units = fixed_point.find_units(arrays["d_out"], arrays["delta"], arrays["v"])
    return Scales(fixed_point.find_columns(arrays["k"]), units)


def in_units(parts, scales):
    """float64 numbers of units that a kernel would round and add."""
    columns = np.repeat(np.asarray(scales.columns, np.float64)[0], 2, axis=0)
    return parts / columns * np.asarray(scales.units, np.float64)[0].T[:, :, None]


@pytest.mark.parametrize("sharp", [0.01, 1.0, 30.0])
def test_sums_fit_and_are_right_in_any_order(sharp):
    arrays, parts = problem(0, sharp=sharp)
    scales = find_scales(arrays)
    counted = in_units(parts, scales)
    assert np.abs(counted).sum(0).max() < 2**30
    rounded = np.rint(counted).astype(np.int32)
    total, again = np.int32(0), np.int32(0)
    with np.errstate(over="ignore"):
        for i in range(len(rounded)):
            total, again = total + rounded[i], again + rounded[-1 - i]
    np.testing.assert_array_equal(total, again)
    actual = fixed_point.value_of(jnp.asarray(total[None]), scales, 2.0, jnp.float32)
    want = 2.0 * parts.sum(0)
    error = np.abs(np.asarray(actual[0]) - want).max((0, 1)) / np.abs(want).max((0, 1))
    assert error.max() < 2e-6  # of each column's largest


def test_columns_are_powers_of_two_at_or_below_the_largest():
    k = jnp.asarray([[[0.0, 1.0, -3.9, 2.0**-120]], [[0.0, 0.2, 1.0, 0.0]]], jnp.bfloat16)[None]
    columns = fixed_point.find_columns(k)
    np.testing.assert_array_equal(columns[0, 0], [1.0, 1.0, 2.0, 2.0**-120])


def test_queries_without_gradient_get_zeros():
    arrays, _ = problem(1)
    arrays["d_out"] *= 0
    arrays["delta"] *= 0
    scales = find_scales(arrays)
    assert np.isfinite(scales.units).all()
    dq = fixed_point.value_of(jnp.zeros((1, 96, 4, 16), jnp.int32), scales, 1.0, jnp.bfloat16)
    assert not np.asarray(dq, np.float32).any()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["d_out", "delta"])
def test_what_is_not_finite_is_not_hidden(name, bad):
    """Integer accumulation must not hide it, nor leak it into another query's gradient."""
    arrays, _ = problem(2)
    index = (0, 5, 0, 3) if name == "d_out" else (0, 0, 5)
    arrays[name] = arrays[name].at[index].set(bad)
    for total in (0, 12345):
        sums = jnp.full((1, 96, 4, 16), total, jnp.int32)
        dq = fixed_point.value_of(sums, find_scales(arrays), 1.0, jnp.bfloat16)
        bad_queries = ~np.isfinite(np.asarray(dq, np.float32))[0]
        assert bad_queries[5, 0].all() and bad_queries.sum() == 16
