"""Linear: the one place where a weight meets an activation."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from jaxtrain.distributed.sharding import gathered

Dtype = jnp.dtype | type | str


class Linear(nnx.Module):
    """y[..., out] = x[..., in] @ kernel[in, out] (+ bias[out]), computed in `dtype`.

    Two slots, for jaxtrain.adapters: `kernel` may be a module that stores it in fewer bits, with
    `multiply(x)`, for experts `packed()`; `adapter` is None, or a module (x, y, kernel) ->
    corrected y. `product`: None, or what multiplies x by a kernel in other numbers (layers.fp8).
    """

    token_share = 1.0
    """Share of the weights that a token is multiplied with."""
    settles = False
    """Whether the result goes through `settle`: set for layers in a scan."""

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
        if not isinstance(self.kernel, nnx.Param):
            product = self.kernel.multiply(x)
        else:
            kernel = gathered(self.kernel, self.dtype)
            product = x @ kernel if self.product is None else self.product(x, kernel)
        y = self.correct(x, product)
        return settle(y) if self.settles else y

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


def settle(y: jax.Array) -> jax.Array:
    """y itself, which the backward pass may keep ("linear_out" for layers.stack's policies).

    A scan keeps it in a stack of all layers'. XLA for GPUs has the matmul write straight into that
    stack, and to whoever reads y now it gives a second matmul; not so behind a barrier.
    """
    return checkpoint_name(_settle(y), "linear_out")


@jax.custom_vjp
def _settle(y: jax.Array) -> jax.Array:
    return y


def _settle_fwd(y):
    return jax.lax.optimization_barrier(y), None


def _settle_bwd(_, d_y):
    return (d_y,)


_settle.defvjp(_settle_fwd, _settle_bwd)


class PreciseLinear(Linear):
    """A Linear whose kernel is never stored in fewer bits: it is small, and decides much."""


Place = Callable[[Sequence[str | None], Sequence[int]], PartitionSpec]
"""(logical axes, shape) -> where such an array lies."""


class PackedMatrices(Protocol):
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
    """A PartitionSpec for each leaf of an expert's kernel, an array or `PackedMatrices`."""
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

        The kernel is an array in the param dtype, as the op casts it itself, or `PackedMatrices`.
        """
        plain = isinstance(self.kernel, nnx.Param)
        kernel = self.kernel[...] if plain else self.kernel.packed()
        if self.adapter is None:
            return kernel, None
        a, b = self.adapter.a[...], self.adapter.b[...]
        return kernel, (a, b * jnp.asarray(self.adapter.scale, b.dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        raise AssertionError("experts are multiplied by the grouped matmul")
