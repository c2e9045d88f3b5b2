"""The definition of rotate_heads: an RMSNorm of every head, then the rotation, plain autodiff."""

import jax
import jax.numpy as jnp

from jaxtrain_kernels.precision import accumulator


def normalize(x, scale, eps):
    """x / sqrt(mean(x^2) + eps) * scale over the last dim; statistics in at least float32.

    The normalized value is rounded to x's dtype before the scale is applied, as transformers does.
    """
    return to_unit(x, eps).astype(x.dtype) * jnp.broadcast_to(scale.astype(x.dtype), x.shape)


def to_unit(x, eps):
    """x over the root of its mean square, in at least float32."""
    wide = x.astype(accumulator(x.dtype))
    return wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)


def rotate_heads(x, cos, sin, counts, head_dim, scales=None, *, eps, normalize=normalize):
    """Implement `jaxtrain_kernels.rotate_heads`."""
    parts = split_heads(x, counts, head_dim)
    for part in range(len(counts)):
        if scales is not None:
            parts[part] = normalize(parts[part], scales[part], eps)
        parts[part] = rotate(parts[part], cos, sin)
    return tuple(parts)


def split_heads(x, counts, head_dim):
    """[B, T, n, H] for each of `counts`, and of the rest if there is one."""
    rest = x.shape[-1] // head_dim - sum(counts)
    widths = [n * head_dim for n in (*counts, *([rest] if rest else []))]
    pieces = jax.lax.split(x, widths, axis=2)
    return [piece.reshape(*x.shape[:2], -1, head_dim) for piece in pieces]


def rotate(x_BTNH, cos, sin):
    """x with dim i and i + R/2 of its first R rotated as a pair, in x's dtype; the others pass.

    cos, sin [B, T, R/2], at least float32.
    """
    if 2 * cos.shape[-1] < x_BTNH.shape[-1]:
        turned, passed = jnp.split(x_BTNH, [2 * cos.shape[-1]], axis=-1)
        return jnp.concatenate([rotate(turned, cos, sin), passed], axis=-1)
    first, second = jnp.split(x_BTNH.astype(cos.dtype), 2, axis=-1)
    return rotate_pairs(first, second, cos, sin).astype(x_BTNH.dtype)


def rotate_pairs(first, second, cos, sin):
    """The two halves [B, T, N, R/2] of pairs, turned; side by side again."""
    cos, sin = cos[:, :, None], sin[:, :, None]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
