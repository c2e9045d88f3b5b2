"""Products of several kernels at once are the products of each."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxtrain.layers.linear import MANY, Linear, multiply_together


@pytest.mark.parametrize("num_vectors", [MANY // 2, MANY])
def test_several_products_with_their_gradients(num_vectors):
    q, k, v = (
        Linear(24, n, axes=("embed", "heads"), use_bias=bias, init_std=1.0, rngs=nnx.Rngs(n))
        for n, bias in ((8, True), (16, False), (8, False))
    )
    x = jax.random.normal(jax.random.key(0), (2, num_vectors // 2, 24))
    apart, rest = nnx.split([q, k, v])
    weigh = [jax.random.normal(jax.random.key(n), (8 * n,)) for n in (1, 2, 1)]

    def total(rest, x, together):
        linears = nnx.merge(apart, rest)
        products = multiply_together(x, *linears) if together else [linear(x) for linear in linears]
        return sum(jnp.sin(y @ w).sum() for y, w in zip(products, weigh, strict=True))

    (value, gradients), (wanted, expected) = (
        jax.value_and_grad(total, argnums=(0, 1))(rest, x, together) for together in (True, False)
    )
    np.testing.assert_allclose(value, wanted, rtol=1e-4)
    for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected), strict=True):
        # float32: sums over hundreds of vectors in another order.
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)
    kernels = jax.make_jaxpr(lambda x: multiply_together(x, q, k, v))(x).jaxpr.eqns
    joined = any(eqn.primitive.name == "concatenate" for eqn in kernels)
    assert joined == (num_vectors >= MANY)
