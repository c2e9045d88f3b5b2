"""Linear: the one place where a weight meets an activation."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from jaxtrain.distributed.sharding import gathered

Dtype = jnp.dtype | type | str


@dataclasses.dataclass(frozen=True)
class LayerInit:
    """Settings by which the parameters of layers are created, and the dtype of their use."""

    rngs: nnx.Rngs
    std: float = 0.02
    """Standard deviation of new weights."""
    param_dtype: Dtype = jnp.float32
    dtype: Dtype = jnp.float32
    """Dtype of activations and matmuls."""

    def normal(self, shape: Sequence[int]) -> jax.Array:
        """Draw weights of a shape. Each call takes the next key: the order of calls is part of
        what a seed means."""
        key, size = self.rngs.params(), math.prod(shape)
        if isinstance(key, jax.core.Tracer):
            return self.std * jax.random.normal(key, shape, self.param_dtype)
        # Outside of a program: a number depends on its index alone, so few programs draw arrays of
        # all sizes, with the bits that a program of the whole model draws.
        rounded = 4 ** max(5, math.ceil(math.log(max(size, 1), 4)))
        drawn = _draw_normal(key, rounded, self.std, jnp.dtype(self.param_dtype))
        # Cut on the host, where a shape takes no program.
        return jnp.asarray(np.asarray(drawn)[:size].reshape(shape))


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _draw_normal(key: jax.Array, size: int, std: float, dtype: Dtype) -> jax.Array:
    # The deviation is a constant, as in a program of a whole model: XLA folds it into others.
    return std * jax.random.normal(key, (size,), dtype)


class Linear(nnx.Module):
    """y[..., out] = x[..., in] @ kernel[in, out] (+ bias[out]), computed in `dtype`.

    Two slots, for jaxtrain.adapters: `kernel` may be a module that stores it in fewer bits, with
    `multiply(x)`, for experts `packed()`; `adapter` is None, or a module (x, y, kernel) ->
    corrected y. `product`: None, or a matmul in another number format (layers.fp8).
    """

    token_share = 1.0
    """Share of the weights that multiply each token."""
    fuses = True
    """One matmul may compute it together with others that read the same input."""
    output_barrier = False
    """Apply `with_output_barrier` to the result: set for layers in a scan."""

    def __init__(
        self,
        num_in: int,
        num_out: int,
        *,
        axes: tuple[str | None, ...],
        lead: tuple[int, ...] = (),
        use_bias: bool = False,
        init: LayerInit,
    ):
        shape = (*lead, num_in, num_out)
        kernel = init.normal(shape)
        self.kernel: Any = nnx.Param(kernel, axes=axes)
        self.bias = (
            nnx.Param(
                jnp.zeros((*lead, num_out), init.param_dtype), axes=(*axes[: len(lead)], axes[-1])
            )
            if use_bias
            else None
        )
        # nnx.data: a module may take its place later, which a plain None would forbid.
        self.adapter: Any = nnx.data(None)
        self.product: Callable[[jax.Array, jax.Array], jax.Array] | None = None
        self.dtype = jnp.dtype(init.dtype)

    @property
    def rounds_kernel(self) -> bool:
        """True if the kernel may be rounded to `dtype` before the call: nothing else reads it."""
        plain = isinstance(self.kernel, nnx.Param)
        return plain and not getattr(self.adapter, "reads_kernel", False)

    def __call__(self, x: jax.Array) -> jax.Array:
        if not isinstance(self.kernel, nnx.Param):
            product = self.kernel.multiply(x)
        else:
            # Cast before the all-gather, so that devices exchange the narrow dtype.
            kernel = gathered(self.kernel, self.dtype)
            product = x @ kernel if self.product is None else self.product(x, kernel)
        y = self.correct(x, product)
        return with_output_barrier(y) if self.output_barrier else y

    def matrix(self, num_in: int) -> jax.Array:
        """Return [num_in, out] in `dtype`: the kernel and its adapter's correction as one matrix,
        for callers that multiply by slices of it."""
        if isinstance(self.kernel, nnx.Param) and self.adapter is None:
            return gathered(self.kernel, self.dtype)
        assert self.bias is None, "a bias is no part of a matrix"
        # An adapter or packed kernel only defines products; that with the identity is the matrix.
        return self(jnp.eye(num_in, dtype=self.dtype))

    def correct(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """Add the adapter's correction and the bias to y = x @ kernel."""
        if self.adapter is not None:
            plain = isinstance(self.kernel, nnx.Param)
            y = self.adapter(x, y, self.kernel[...] if plain else None)
        return y if self.bias is None else y + self.bias[...].astype(self.dtype)


def with_output_barrier(y: jax.Array) -> jax.Array:
    """Return y, named "linear_out" for the checkpoint policies of layers.stack.

    A scan saves y in a stack of all layers' outputs. XLA for GPUs fuses the matmul with the write
    to that stack, and computes y a second time for the other readers in the layer. The optimization
    barrier makes the matmul's own output the one value that everybody reads.
    """
    return checkpoint_name(_value_barrier(y), "linear_out")


# A custom_vjp: only a differentiated y is saved and needs the barrier, and its gradient needs none.
@jax.custom_vjp
def _value_barrier(y: jax.Array) -> jax.Array:
    return y


def _value_barrier_fwd(y):
    return jax.lax.optimization_barrier(y), None


def _value_barrier_bwd(_, d_y):
    return (d_y,)


_value_barrier.defvjp(_value_barrier_fwd, _value_barrier_bwd)


class ClippedLinear(Linear):
    """A Linear whose input and output are clipped to limits, numbers that are loaded and saved and
    have no gradient (towers of Gemma 4)."""

    fuses = False
    limits = ("input_min", "input_max", "output_min", "output_max")

    def __init__(
        self, num_in: int, num_out: int, *, axes: tuple[str | None, ...], init: LayerInit, **options
    ):
        super().__init__(num_in, num_out, axes=axes, init=init, **options)
        for name in self.limits:
            limit = -UNLIMITED if name.endswith("min") else UNLIMITED
            setattr(self, name, nnx.Param(jnp.array(limit, init.param_dtype), axes=()))

    def __call__(self, x: jax.Array) -> jax.Array:
        limits = (jax.lax.stop_gradient(getattr(self, name)[...]) for name in self.limits)
        least_in, most_in, least, most = (limit.astype(self.dtype) for limit in limits)
        return jnp.clip(super().__call__(jnp.clip(x, least_in, most_in)), least, most)


UNLIMITED = 3e38
"""Stands for infinity among the limits: an optimizer may multiply them by 0."""


class PreciseLinear(Linear):
    """A Linear whose kernel is never stored in fewer bits: it is small, and gates depend on it."""


SpecOf = Callable[[Sequence[str | None], Sequence[int]], PartitionSpec]
"""(logical axes, shape) -> PartitionSpec of such an array."""


class PackedMatrices(Protocol):
    """Frozen matrices of experts in fewer bits: a pytree, which is stored and moved as it is."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(E, in, out) of the matrices; inside a shard_map, of this device's."""
        ...

    def unpack(self, dtype: jnp.dtype) -> jax.Array:
        """[E, in, out]."""
        ...

    def specs(self, names: Sequence[str | None], spec_of: SpecOf) -> Any:
        """Return this pytree with a PartitionSpec for each leaf; names: of the dims of `shape`."""
        ...


def kernel_specs(kernel: Any, names: Sequence[str | None], spec_of: SpecOf) -> Any:
    """A PartitionSpec for each leaf of an expert's kernel, an array or `PackedMatrices`."""
    if hasattr(kernel, "specs"):
        return kernel.specs(names, spec_of)
    return spec_of(names, kernel.shape)


class ExpertLinear(Linear):
    """A matrix for each of E experts, kernel [E, in, out]; `axes` are those of one matrix, and a
    token goes to `top` of them.

    It only returns its weights, because the grouped matmul multiplies by all of them at once.
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
