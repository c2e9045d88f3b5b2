"""LoRA (Hu et al. 2021, arXiv:2106.09685) and DoRA (Liu et al. 2024, arXiv:2402.09353).

Both sit in the `adapter` slot of a Linear and correct its product y = x W:

    LoRA   y + s (x A) B                                 A [in, R], B [R, out], s = alpha / R
    DoRA   (y + s (x A) B) * m / ||W + s A B||           m [out]; the norm is that of each column

In training a LoRA may drop out parts of the x that its A reads, as PEFT does; of DoRA then

    y + (m / ||W + s A B|| - 1) x' W + m / ||W + s A B|| s (x' A) B      x' = dropout(x)

In a stack of layers all of them carry a leading axis L, as the kernel does.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxtrain.errors import UserError
from jaxtrain.layers.linear import with_output_barrier
from jaxtrain.layers.noise import Noisy, drop_out


class LoRA(Noisy):
    """a [..., in, R] and b [..., R, out]: shapes or arrays; `axes` are the kernel's. dropout: of
    its input, drawn by the module's own `salt`."""

    output_barrier = False
    """As Linear's: of x A, which the backward pass keeps."""

    def __init__(
        self, a, b, scale: float, axes: tuple[str | None, ...], dropout: float = 0.0, salt: int = 0
    ):
        super().__init__()
        self.a = nnx.Param(a, axes=(*axes[:-1], "rank"))
        self.b = nnx.Param(b, axes=(*axes[:-2], "rank", axes[-1]))
        self.scale, self.dropout, self.salt = scale, dropout, salt

    @property
    def drops(self) -> bool:
        """True if this pass applies dropout."""
        return self.dropout > 0 and self.rng_bits is not None

    def __call__(self, x: jax.Array, y: jax.Array, kernel: jax.Array) -> jax.Array:
        """The corrected y [..., out] of x [..., in]; in y's dtype."""
        if self.drops:
            # Neither the mask nor what it leaves is kept for the backward pass.
            down = jax.checkpoint(lambda x, a: self.thinned(x) @ a)
        else:
            down = jnp.matmul
        low = down(x, self.a[...].astype(y.dtype)) * self.scale
        low = with_output_barrier(low) if self.output_barrier else low
        # Named for layers.stack's policies: the backward pass keeps the sum, not both its terms.
        return checkpoint_name(y + low @ self.b[...].astype(y.dtype), "adapted_out")

    def thinned(self, x: jax.Array) -> jax.Array:
        """x [B, T, in] after dropout."""
        if x.shape[:2] != self.rng_bits.shape:
            raise UserError(
                f"adapter.dropout: a matrix with an adapter reads {x.shape} here, which are not the"
                f" {self.rng_bits.shape} tokens of the batch; set it to 0, or leave that matrix out"
                " of adapter.target"
            )
        return drop_out(x, self.rng_bits, self.salt, self.dropout)


class DoRA(LoRA):
    """LoRA with a trained length `magnitude` [..., out] for every column of the weight."""

    reads_kernel = True

    def __init__(
        self,
        a,
        b,
        magnitude,
        scale: float,
        axes: tuple[str | None, ...],
        dropout: float = 0.0,
        salt: int = 0,
    ):
        super().__init__(a, b, scale, axes, dropout, salt)
        self.magnitude = nnx.Param(magnitude, axes=(*axes[:-2], axes[-1]))

    def __call__(self, x: jax.Array, y: jax.Array, kernel: jax.Array) -> jax.Array:
        # The paper's section 4.3: the norm is a constant for the gradient, which saves memory.
        norm = jax.lax.stop_gradient(column_norms(kernel, self.a[...], self.b[...], self.scale))
        magnitude = self.magnitude[...].astype(norm.dtype)
        # Infinite in layers of a stack that have no adapter.
        ratio = jnp.where(jnp.isinf(magnitude), 1.0, magnitude / norm)
        if self.drops:
            plain = self.thinned(x) @ kernel.astype(y.dtype)
            corrected = super().__call__(x, plain, kernel)
            return y + (corrected.astype(norm.dtype) * ratio - plain).astype(y.dtype)
        y = super().__call__(x, y, kernel)
        return (y.astype(norm.dtype) * ratio).astype(y.dtype)


def column_norms(kernel: jax.Array, a: jax.Array, b: jax.Array, scale: float) -> jax.Array:
    """||W + s A B|| over the input axis, [..., out], in at least float32, without that sum.

    ||w||^2 + 2 s <W^T A, B> + s^2 <A^T A, B B^T>: nothing larger than [out, R] is made.
    """
    wide = jnp.promote_types(kernel.dtype, jnp.float32)
    a, b = a.astype(wide), b.astype(wide)
    kernel_squares = jnp.sum(jnp.square(kernel.astype(wide)), axis=-2)
    mixed = jnp.sum(b * jnp.einsum("...io,...ir->...ro", kernel.astype(wide), a), axis=-2)
    gram = jnp.einsum("...ir,...iq->...rq", a, a)
    low = jnp.sum(b * jnp.einsum("...rq,...qo->...ro", gram, b), axis=-2)
    return jnp.sqrt(kernel_squares + 2 * scale * mixed + scale**2 * low)
