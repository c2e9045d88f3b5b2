"""The definition of conv_heads, plain autodiff."""

import jax
import jax.numpy as jnp

from jaxtrain_kernels.precision import accumulator
from jaxtrain_kernels.recurrence.conv import causal_conv


def to_unit(x, length, eps):
    """x along its last dim at that length, in x's dtype; sums in at least float32."""
    wide = x.astype(accumulator(x.dtype))
    unit = wide * jax.lax.rsqrt((wide * wide).sum(-1, keepdims=True) + eps)
    return (length * unit).astype(x.dtype)


def conv_heads(x, w, key_dim, value_dim, prev=None, *, tail=None, hops=None, eps, to_unit=to_unit):
    """Implement `jaxtrain_kernels.conv_heads`."""
    (B, T, _), (H, F, taps) = x.shape, w.shape
    tail = None if tail is None else tail.reshape(B, -1, H * F)
    mixed = causal_conv(x[..., : H * F], w.reshape(H * F, taps), prev, tail)
    mixed = jax.nn.silu(mixed).reshape(B, T, H, F)
    q, k, v = jnp.split(mixed, [key_dim, 2 * key_dim], axis=-1)
    q, k = to_unit(q, key_dim**-0.5, eps), to_unit(k, 1.0, eps)
    return q, k, v.reshape(B, T, -1, value_dim)
