"""The ops under jax's strict modes (dtype and rank promotion), as the project's tests run them."""

import jax
import jax.numpy as jnp
import pytest
from jaxtrain_kernels import (
    Context,
    attention,
    logp_gather,
    rotate_heads,
    weighted_logp,
)


@pytest.fixture(autouse=True)
def strict():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


DTYPES = [pytest.param("float32", marks=pytest.mark.thorough), "bfloat16"]
"""In bfloat16 wide numbers meet narrow ones, which is what strict modes refuse."""


@pytest.mark.parametrize("impl", ["xla", "reference"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention(impl, dtype):
    T = 1030  # two stripes and a rest
    q, k = jnp.ones((1, T, 2, 8), dtype), jnp.ones((1, T, 1, 8), dtype)
    until = jnp.full((1, T), T, jnp.int32)
    positions = jnp.arange(T, dtype=jnp.int32)[None]

    def loss(q):
        context = Context(until, positions=positions)
        out = attention(q, k, k, context, window=9, softcap=2.0, impl=impl)
        return out.astype(jnp.float32).sum()

    assert jax.grad(loss)(q).dtype == jnp.dtype(dtype)


@pytest.mark.parametrize("impl", ["xla", "reference"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_logp_gather(impl, dtype):
    hidden, head = jnp.ones((16, 8), dtype), jnp.ones((50, 8), jnp.float32)
    targets = jnp.zeros((16,), jnp.int32)

    def loss(hidden, head, temperature):
        options = {"temperature": temperature, "softcap": 2.0}
        return sum(x.sum() for x in logp_gather(hidden, head, targets, impl=impl, **options))

    for temperature in (0.7, jnp.ones((16,), jnp.float32)):
        gradient = jax.grad(loss, (0, 1))(hidden, head, temperature)
        assert [g.dtype for g in gradient] == [jnp.dtype(dtype), jnp.float32]


@pytest.mark.parametrize("impl", ["xla", "reference"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_weighted_logp(impl, dtype):
    hidden, head = jnp.ones((16, 8), dtype), jnp.ones((50, 8), jnp.float32)
    targets, weights = jnp.zeros((16,), jnp.int32), jnp.ones((16,), jnp.float32)

    def loss(hidden, head, temperature):
        options = {"temperature": temperature, "softcap": 2.0}
        return weighted_logp(hidden, head, targets, weights, impl=impl, **options)[0]

    for temperature in (0.7, jnp.ones((16,), jnp.float32)):
        gradient = jax.grad(loss, (0, 1))(hidden, head, temperature)
        assert [g.dtype for g in gradient] == [jnp.dtype(dtype), jnp.float32]


@pytest.mark.parametrize("impl", ["xla", "reference"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotate_heads(impl, dtype):
    x, angle = jnp.ones((1, 4, 64), dtype), jnp.ones((1, 4, 4))

    def loss(x, scale):
        outs = rotate_heads(x, angle, angle, (2, 1), 16, [scale, scale], impl=impl)
        return sum(out.astype(jnp.float32).sum() for out in outs)

    gradient = jax.grad(loss, (0, 1))(x, jnp.ones((16,)))
    assert [g.dtype for g in gradient] == [jnp.dtype(dtype), jnp.float32]
