"""Linear: the one place where a weight meets an activation."""

import jax
import jax.numpy as jnp
from flax import nnx

Dtype = jnp.dtype | type | str


class Linear(nnx.Module):
    """y[..., out] = x[..., in] @ kernel[in, out] (+ bias[out]), computed in `dtype`.

    Two slots, for jaxtrain.adapters: `kernel` may be a module with `multiply(x)` that stores it in
    fewer bits; `adapter` is None, or a module (x, y, kernel) -> corrected y.
    """

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
        self.kernel = nnx.Param(kernel, axes=axes)
        self.bias = (
            nnx.Param(jnp.zeros((num_out,), param_dtype), axes=axes[-1:]) if use_bias else None
        )
        self.adapter = nnx.data(None)
        self.dtype = jnp.dtype(dtype)

    @property
    def rounds_kernel(self) -> bool:
        """Whether the kernel may be rounded to `dtype` ahead of the call: nothing else reads it."""
        plain = isinstance(self.kernel, nnx.Param)
        return plain and not getattr(self.adapter, "reads_kernel", False)

    def __call__(self, x: jax.Array) -> jax.Array:
        if isinstance(self.kernel, nnx.Param):
            kernel = self.kernel[...]
            y = x @ kernel.astype(self.dtype)
        else:
            kernel, y = None, self.kernel.multiply(x)
        if self.adapter is not None:
            y = self.adapter(x, y, kernel)
        return y if self.bias is None else y + self.bias[...].astype(self.dtype)


class ExpertLinear(Linear):
    """A matrix for each of E experts, kernel [E, in, out]; `axes` are those of one matrix.

    The grouped matmul multiplies by it, so the module only hands its weights out.
    """

    def __init__(
        self,
        num_experts: int,
        num_in: int,
        num_out: int,
        *,
        axes: tuple[str | None, str | None],
        **options,
    ):
        lead, axes = (num_experts,), ("experts", *axes)
        super().__init__(num_in, num_out, axes=axes, lead=lead, **options)

    def weights(self) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | None]:
        """(kernel, None or the factors a [E, in, R] and b [E, R, out] of what is added to it); the
        kernel in the param dtype, as the op casts it itself."""
        if self.adapter is None:
            return self.kernel[...], None
        a, b = self.adapter.a[...], self.adapter.b[...]
        return self.kernel[...], (a, b * jnp.asarray(self.adapter.scale, b.dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        raise AssertionError("experts are multiplied by the grouped matmul")
