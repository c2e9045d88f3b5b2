"""Products of several kernels at once are the products of each."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxtrain.adapters.int8 import Int8, quantize_int8
from jaxtrain.adapters.lora import DoRA
from jaxtrain.distributed.mesh import make_mesh
from jaxtrain.layers.fused_linear import MIN_VECTORS, fuse_kernels, fused_product, multiply_fused
from jaxtrain.layers.linear import LayerInit, Linear


@pytest.mark.parametrize(
    "num_vectors", [pytest.param(MIN_VECTORS // 2, marks=pytest.mark.slow), MIN_VECTORS]
)
def test_several_products_with_their_gradients(num_vectors):
    q, k, v = (
        Linear(24, n, axes=("embed", "heads"), use_bias=bias, init=LayerInit(nnx.Rngs(n), 1.0))
        for n, bias in ((8, True), (16, False), (8, False))
    )
    x = jax.random.normal(jax.random.key(0), (2, num_vectors // 2, 24))
    apart, rest = nnx.split([q, k, v])
    weigh = [jax.random.normal(jax.random.key(n), (8 * n,)) for n in (1, 2, 1)]

    def total(rest, x, together):
        linears = nnx.merge(apart, rest)
        products = multiply_fused(x, *linears) if together else [linear(x) for linear in linears]
        return sum(jnp.sin(y @ w).sum() for y, w in zip(products, weigh, strict=True))

    (value, gradients), (expectation, expected) = (
        jax.value_and_grad(total, argnums=(0, 1))(rest, x, together) for together in (True, False)
    )
    np.testing.assert_allclose(value, expectation, rtol=1e-4)
    for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected), strict=True):
        # float32: sums over hundreds of vectors in another order.
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)
    kernels = jax.make_jaxpr(lambda x: multiply_fused(x, q, k, v))(x).jaxpr.eqns
    joined = any(eqn.primitive.name == "concatenate" for eqn in kernels)
    assert joined == (num_vectors >= MIN_VECTORS)


def make_linears(**options):
    return [
        Linear(
            *(24, n),
            axes=("embed", "heads"),
            use_bias=n == 8,
            init=LayerInit(nnx.Rngs(n), **options),
        )
        for n in (8, 16)
    ]


def put_in_8_bits(*linears):
    for linear in linears:
        linear.kernel = Int8(quantize_int8(linear.kernel[...]), ("embed", "heads"))


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "int8"])
def test_joined_kernels_are_multiplied_at_once_however_few_the_vectors(stored):
    dtype = "float32" if stored == "int8" else stored
    linears = make_linears(dtype=dtype)
    if stored == "int8":
        put_in_8_bits(*linears)
    x = jax.random.normal(jax.random.key(0), (3, 1, 24)).astype(dtype)
    expected = [linear(x) for linear in linears]
    fuse_kernels(*linears)
    for y, expectation in zip(multiply_fused(x, *linears), expected, strict=True):
        # The same sums, perhaps in another order, rounded to `dtype` once.
        result, reference = (np.asarray(item, np.float64) for item in (y, expectation))
        near = {"rtol": 2**-7} if stored == "bfloat16" else {"rtol": 1e-5, "atol": 1e-7}
        np.testing.assert_allclose(result, reference, **near)
    traced = str(jax.make_jaxpr(multiply_fused)(x, *linears))
    assert traced.count("dot_general") == 1 and "concatenate" not in traced
    # Stored once, an array in the dtype that it is multiplied in.
    (retained,) = (leaf for leaf in jax.tree.leaves(nnx.state(linears)) if leaf.ndim == 2)
    assert retained.shape == (24, 24) and retained.dtype == stored
    assert fused_product(x, *linears) is None, "one of them has a bias"
    with pytest.raises(AssertionError, match="multiply_fused only"):
        linears[1](x)


@pytest.mark.parametrize("why", ["alone", "one in 8 bits", "read by DoRA", "fp8", "split"])
def test_kernels_stay_apart_where_joined_ones_would_be_wrong_or_slow(why):
    linears = make_linears()
    mesh = make_mesh(jax.devices()[:2], **{"tensor" if why == "split" else "data": 2})
    if why == "alone":
        linears = linears[:1]
    elif why == "one in 8 bits":
        put_in_8_bits(linears[1])
    elif why == "read by DoRA":
        factors = jnp.ones((24, 2)), jnp.ones((2, 16)), jnp.ones(16)
        linears[1].adapter = DoRA(*factors, 1.0, ("embed", "heads"))
    elif why == "fp8":
        linears[1].product = jnp.matmul
    before = [linear.kernel for linear in linears]
    with jax.set_mesh(mesh):
        fuse_kernels(*linears)
    assert all(item.kernel is kernel for item, kernel in zip(linears, before, strict=True))
