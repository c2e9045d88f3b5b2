"""Linear: the one place where a weight meets an activation."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from jaxtrain.parallel.rules import constrain, gathered, mesh_axes

Dtype = jnp.dtype | type | str

MANY = 512  # vectors: from so many the matmul outweighs putting the kernels together


class Linear(nnx.Module):
    """y[..., out] = x[..., in] @ kernel[in, out] (+ bias[out]), computed in `dtype`.

    Two slots, for jaxtrain.adapters: `kernel` may be a module that stores it in fewer bits, with
    `multiply(x)`, for experts `packed()`; `adapter` is None, or a module (x, y, kernel) ->
    corrected y. `product`: None, or what multiplies x by a kernel in other numbers (layers.fp8).
    """

    token_share = 1.0
    """Share of the weights that a token is multiplied with."""

    def __init__(
        self,
        num_in: int,
        num_out: int,
        *,
        axes: tuple[str | None, ...],
        lead: tuple[int, ...] = (),
        use_bias: bool = False,
        init_std: float = 0.02,
        param_dtype: Dtype = jnp.float32,
        dtype: Dtype = jnp.float32,
        rngs: nnx.Rngs,
    ):
        shape = (*lead, num_in, num_out)
        kernel = init_std * jax.random.normal(rngs.params(), shape, param_dtype)
        self.kernel: Any = nnx.Param(kernel, axes=axes)
        self.bias = (
            nnx.Param(jnp.zeros((*lead, num_out), param_dtype), axes=(*axes[: len(lead)], axes[-1]))
            if use_bias
            else None
        )
        self.adapter: Any = nnx.data(None)
        self.product: Callable[[jax.Array, jax.Array], jax.Array] | None = None
        self.dtype = jnp.dtype(dtype)

    @property
    def rounds_kernel(self) -> bool:
        """Whether the kernel may be rounded to `dtype` ahead of the call: nothing else reads it."""
        plain = isinstance(self.kernel, nnx.Param)
        return plain and not getattr(self.adapter, "reads_kernel", False)

    def __call__(self, x: jax.Array) -> jax.Array:
        if isinstance(self.kernel, nnx.Param):
            kernel = gathered(self.kernel, self.dtype)
            return self.correct(x, x @ kernel if self.product is None else self.product(x, kernel))
        return self.correct(x, self.kernel.multiply(x))

    def matrix(self, num_in: int) -> jax.Array:
        """[num_in, out] in `dtype`: the kernel as it is stored with what the adapter adds, without
        the bias; for who multiplies by parts of it."""
        if isinstance(self.kernel, nnx.Param) and self.adapter is None:
            return gathered(self.kernel, self.dtype)
        assert self.bias is None, "a bias is no part of a matrix"
        return self(jnp.eye(num_in, dtype=self.dtype))

    def correct(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """y = x @ kernel with what the adapter and the bias add."""
        if self.adapter is not None:
            plain = isinstance(self.kernel, nnx.Param)
            y = self.adapter(x, y, self.kernel[...] if plain else None)
        return y if self.bias is None else y + self.bias[...].astype(self.dtype)


class PreciseLinear(Linear):
    """A Linear whose kernel is never stored in fewer bits: it is small, and decides much."""


def multiply_together(x: jax.Array, *linears: Linear) -> list[jax.Array]:
    """[linear(x) for linear in linears]; as one matmul where kernels are arrays on one device and
    x holds at least MANY vectors.

    One long product in each pass instead of several short ones, and their gradients to x need not
    be added. What the backward pass keeps is the product, not its pieces. Of few vectors, as in
    decoding, the product costs less than putting the kernels side by side: see `join`.
    """
    product = _multiply(x, linears)
    if product is None:
        return [linear(x) for linear in linears]
    widths = [linear.kernel.shape[-1] for linear in linears]
    pieces = jax.lax.split(product, widths, axis=x.ndim - 1)
    return [linear.correct(x, y) for linear, y in zip(linears, pieces, strict=True)]


def multiply_side_by_side(x: jax.Array, *linears: Linear) -> jax.Array | None:
    """`multiply_together` in one array [..., out of all], for who reads the pieces in place; None
    where they are no pieces of one matmul, or an adapter or a bias adds to them."""
    bare = all(linear.adapter is None and linear.bias is None for linear in linears)
    return _multiply(x, linears) if bare else None


class Columns(nnx.Module):
    """In the place of a Linear's kernel [in, out]: some columns of one that lies with the first of
    those that share it. Only `multiply_together` can multiply by all of them."""

    def __init__(self, shape: tuple[int, ...], whole: Any = None):
        self.shape, self.whole = shape, nnx.data(whole)

    def multiply(self, x: jax.Array) -> jax.Array:
        raise AssertionError("multiplied by with its neighbours only")


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
        linear.kernel = Columns(kernel.shape, whole if kernel is first else None)


def _multiply(x: jax.Array, linears: Sequence[Linear]) -> jax.Array | None:
    """x times all kernels, as one matmul; None where it is none."""
    if isinstance(columns := linears[0].kernel, Columns):
        whole = columns.whole
        assert whole.shape[-1] == sum(linear.kernel.shape[-1] for linear in linears)
        plain = isinstance(whole, nnx.Param)
        return _whole(x @ gathered(whole, linears[0].dtype)) if plain else whole.multiply(x)
    mesh = jax.sharding.get_abstract_mesh()
    plain = all(isinstance(linear.kernel, nnx.Param) for linear in linears)
    plain = plain and all(linear.product is None for linear in linears)
    # Pieces of a product that is split over devices would have to be moved.
    split = not mesh.empty and mesh.size > 1
    if not plain or split or math.prod(x.shape[:-1]) < MANY:
        return None
    kernels = [linear.kernel[...].astype(linear.dtype) for linear in linears]
    return _whole(x @ jnp.concatenate(kernels, axis=1))


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


Place = Callable[[Sequence[str | None], Sequence[int]], PartitionSpec]
"""(logical axes, shape) -> where such an array lies."""


class Packed(Protocol):
    """Matrices of experts in fewer bits, frozen: a pytree, which is all that is kept and moved."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(E, in, out) of the matrices, here those of this device."""
        ...

    def unpack(self, dtype: jnp.dtype) -> jax.Array:
        """[E, in, out]."""
        ...

    def specs(self, names: Sequence[str | None], place: Place) -> Any:
        """The same pytree with a PartitionSpec for each leaf; names: of the dims of `shape`."""
        ...


def kernel_specs(kernel: Any, names: Sequence[str | None], place: Place) -> Any:
    """A PartitionSpec for each leaf of an expert's kernel, an array or `Packed`."""
    return kernel.specs(names, place) if hasattr(kernel, "specs") else place(names, kernel.shape)


class ExpertLinear(Linear):
    """A matrix for each of E experts, kernel [E, in, out]; `axes` are those of one matrix, and a
    token goes to `top` of them.

    The grouped matmul multiplies by it, so the module only hands its weights out.
    """

    def __init__(
        self,
        num_experts: int,
        top: int,
        num_in: int,
        num_out: int,
        *,
        axes: tuple[str | None, str | None],
        **options,
    ):
        lead, axes = (num_experts,), ("experts", *axes)
        super().__init__(num_in, num_out, axes=axes, lead=lead, **options)
        self.token_share = top / num_experts

    def weights(self) -> tuple[Any, tuple[jax.Array, jax.Array] | None]:
        """(kernel, None or the factors a [E, in, R] and b [E, R, out] of what is added to it).

        The kernel is an array in the param dtype, as the op casts it itself, or `Packed`.
        """
        plain = isinstance(self.kernel, nnx.Param)
        kernel = self.kernel[...] if plain else self.kernel.packed()
        if self.adapter is None:
            return kernel, None
        a, b = self.adapter.a[...], self.adapter.b[...]
        return kernel, (a, b * jnp.asarray(self.adapter.scale, b.dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        raise AssertionError("experts are multiplied by the grouped matmul")
