"""Several Linears of the same input as one matmul with their concatenated kernels."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.distributed.sharding import constrain, gathered, mesh_axes
from jaxtrain.layers.linear import Linear, with_output_barrier

MIN_VECTORS = 512
"""Fewest input vectors for which the matmul outweighs concatenating the kernels for it."""


def multiply_fused(x: jax.Array, *linears: Linear) -> list[jax.Array]:
    """Return [linear(x) for linear in linears], as one matmul where kernels are fused, or are
    arrays on one device and x holds at least MIN_VECTORS vectors.

    One long product in each pass replaces several short ones, and their gradients to x need not be
    added. The backward pass keeps the product, not its pieces. For few vectors, as in decoding, the
    product costs less than concatenating the kernels; `fuse_kernels` does that in advance.
    """
    product = _product(x, linears)
    if product is None:
        return [linear(x) for linear in linears]
    widths = [linear.kernel.shape[-1] for linear in linears]
    pieces = jax.lax.split(product, widths, axis=x.ndim - 1)
    return [linear.correct(x, y) for linear, y in zip(linears, pieces, strict=True)]


def fused_product(x: jax.Array, *linears: Linear) -> jax.Array | None:
    """Return `multiply_fused` as one array [..., sum of outs], for callers that read its pieces in
    place; None if the results are not pieces of one matmul, or have an adapter or a bias."""
    bare = all(linear.adapter is None and linear.bias is None for linear in linears)
    return _product(x, linears) if bare else None


class FusedColumns(nnx.Module):
    """Stand-in for a Linear's kernel [in, out]: columns of a fused kernel, which the first of the
    Linears that share it holds. Only `multiply_fused` can multiply by them, all at once."""

    def __init__(self, shape: tuple[int, ...], fused: Any = None):
        self.shape, self.fused = shape, nnx.data(fused)

    def multiply(self, x: jax.Array) -> jax.Array:
        raise AssertionError("columns of a fused kernel are multiplied by multiply_fused only")


def fuse_kernels(*linears: Linear) -> None:
    """Concatenate the kernels that `multiply_fused` multiplies by, once, in place.

    Called where kernels are copied anyway. In decoding XLA would otherwise concatenate them for
    every token, which costs as much as reading them. Kernels are arrays, or modules with a method
    `concatenate`. They stay separate if an adapter reads one of them, and if their columns are
    split over devices: pieces of the product would have to be moved.
    """
    kernels = [linear.kernel for linear in linears]
    first, plain = kernels[0], all(isinstance(kernel, nnx.Param) for kernel in kernels)
    packed = hasattr(first, "concatenate") and all(type(k) is type(first) for k in kernels)
    free = all(
        linear.product is None
        and linear.fuses
        and not getattr(linear.adapter, "reads_kernel", False)
        for linear in linears
    )
    if len(linears) == 1 or not free or not (plain or packed):
        return
    mesh = jax.sharding.get_abstract_mesh()
    names = [kernel.get_metadata()["axes"] if plain else kernel.axes for kernel in kernels]
    if not mesh.empty and any(out and mesh_axes(out, mesh) for *_, out in names):
        return
    if plain:
        axes = (*names[0][:-1], None)
        arrays = [linear.kernel[...].astype(linear.dtype) for linear in linears]
        fused = nnx.Param(constrain(jnp.concatenate(arrays, axis=-1), *axes), axes=axes)
    else:
        fused = first.concatenate(*kernels[1:])
    for linear, kernel in zip(linears, kernels, strict=True):
        linear.kernel = FusedColumns(kernel.shape, fused if kernel is first else None)


def _product(x: jax.Array, linears: Sequence[Linear]) -> jax.Array | None:
    """Return x times all kernels, as one matmul; None if they have to be multiplied separately."""
    mesh = jax.sharding.get_abstract_mesh()
    if isinstance(columns := linears[0].kernel, FusedColumns):
        fused = columns.fused
        assert fused.shape[-1] == sum(linear.kernel.shape[-1] for linear in linears)
        if not isinstance(fused, nnx.Param):
            return fused.multiply(x)
        matrix = gathered(fused, linears[0].dtype)
    elif not all(_is_bare(linear) for linear in linears):
        # An adapter would add its correction to a copy of a piece, where it otherwise fuses with
        # the product.
        return None
    elif (not mesh.empty and mesh.size > 1) or math.prod(x.shape[:-1]) < MIN_VECTORS:
        # Pieces of a product that is split over devices would have to be moved.
        return None
    else:
        arrays = [linear.kernel[...].astype(linear.dtype) for linear in linears]
        matrix = jnp.concatenate(arrays, axis=1)
    product = _joined_gradient(x @ matrix)
    return with_output_barrier(product) if linears[0].output_barrier else product


def _is_bare(linear: Linear) -> bool:
    """True if the result is a product with an array, plus at most a bias."""
    plain = isinstance(linear.kernel, nnx.Param) and linear.product is None
    return plain and linear.adapter is None and linear.fuses


@jax.custom_vjp
def _joined_gradient(product: jax.Array) -> jax.Array:
    """Return the product; concatenate its gradient from pieces only once.

    Without the barrier in the backward pass XLA fuses the concatenation into both matmuls that read
    the gradient, and so does it twice.
    """
    return product


def _joined_gradient_fwd(product):
    return product, None


def _joined_gradient_bwd(_, d_product):
    return (jax.lax.optimization_barrier(d_product),)


_joined_gradient.defvjp(_joined_gradient_fwd, _joined_gradient_bwd)
