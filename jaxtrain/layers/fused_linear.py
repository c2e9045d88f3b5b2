"""Several Linears of the same x: one matmul with their kernels side by side."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.distributed.sharding import constrain, gathered, mesh_axes
from jaxtrain.layers.linear import Linear, settle

MANY = 512  # vectors: from so many the matmul outweighs putting the kernels together


def multiply_together(x: jax.Array, *linears: Linear) -> list[jax.Array]:
    """[linear(x) for linear in linears]; as one matmul where kernels are arrays on one device and
    x holds at least MANY vectors.

    One long product in each pass instead of several short ones, and their gradients to x need not
    be added. What the backward pass keeps is the product, not its pieces. Of few vectors, as in
    decoding, the product costs less than putting the kernels side by side: see `join`.
    """
    product = _product(x, linears)
    if product is None:
        return [linear(x) for linear in linears]
    widths = [linear.kernel.shape[-1] for linear in linears]
    pieces = jax.lax.split(product, widths, axis=x.ndim - 1)
    return [linear.correct(x, y) for linear, y in zip(linears, pieces, strict=True)]


def multiply_side_by_side(x: jax.Array, *linears: Linear) -> jax.Array | None:
    """`multiply_together` in one array [..., out of all], for who reads the pieces in place; None
    where they are no pieces of one matmul, or an adapter or a bias adds to them."""
    bare = all(linear.adapter is None and linear.bias is None for linear in linears)
    return _product(x, linears) if bare else None


class FusedColumns(nnx.Module):
    """In the place of a Linear's kernel [in, out]: some columns of one that lies with the first of
    those that share it. Only `multiply_together` can multiply by all of them."""

    def __init__(self, shape: tuple[int, ...], whole: Any = None):
        self.shape, self.whole = shape, nnx.data(whole)

    def multiply(self, x: jax.Array) -> jax.Array:
        raise AssertionError("multiplied by with its neighbors only")


def join(*linears: Linear) -> None:
    """Put the kernels that `multiply_together` multiplies by side by side, once, in place. Where
    that makes no copy that is not made anyway, it is cheaper than in each pass; in decoding XLA
    would do it for every token, which costs as much as reading them.

    Arrays, or modules with a method `beside`. They stay apart where an adapter reads one, too, and
    where their columns are split over devices: pieces of the product would have to be moved.
    """
    kernels = [linear.kernel for linear in linears]
    first, plain = kernels[0], all(isinstance(kernel, nnx.Param) for kernel in kernels)
    packed = hasattr(first, "beside") and all(type(kernel) is type(first) for kernel in kernels)
    free = all(
        one.product is None and not getattr(one.adapter, "reads_kernel", False) for one in linears
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
        whole = nnx.Param(constrain(jnp.concatenate(arrays, axis=-1), *axes), axes=axes)
    else:
        whole = first.beside(*kernels[1:])
    for linear, kernel in zip(linears, kernels, strict=True):
        linear.kernel = FusedColumns(kernel.shape, whole if kernel is first else None)


def _product(x: jax.Array, linears: Sequence[Linear]) -> jax.Array | None:
    """x times all kernels, as one matmul; None where it is none."""
    mesh = jax.sharding.get_abstract_mesh()
    if isinstance(columns := linears[0].kernel, FusedColumns):
        whole = columns.whole
        assert whole.shape[-1] == sum(linear.kernel.shape[-1] for linear in linears)
        if not isinstance(whole, nnx.Param):
            return whole.multiply(x)
        matrix = gathered(whole, linears[0].dtype)
    elif not all(_is_bare(linear) for linear in linears):
        # What an adapter adds would be added to copies of pieces, not to the product.
        return None
    elif (not mesh.empty and mesh.size > 1) or math.prod(x.shape[:-1]) < MANY:
        # Pieces of a product that is split over devices would have to be moved.
        return None
    else:
        matrix = jnp.concatenate([one.kernel[...].astype(one.dtype) for one in linears], axis=1)
    product = _whole(x @ matrix)
    return settle(product) if linears[0].settles else product


def _is_bare(linear: Linear) -> bool:
    """Whether its product is one with an array, and all there is but a bias."""
    plain = isinstance(linear.kernel, nnx.Param) and linear.product is None
    return plain and linear.adapter is None


@jax.custom_vjp
def _whole(product: jax.Array) -> jax.Array:
    """The product itself; its gradient is put together from pieces once, where XLA would do it for
    each of the two matmuls that read it."""
    return product


def _whole_fwd(product):
    return product, None


def _whole_bwd(_, d_product):
    return (jax.lax.optimization_barrier(d_product),)


_whole.defvjp(_whole_fwd, _whole_bwd)
