"""A causal convolution along the branches of packed forests, one filter for each channel."""

import jax
import jax.numpy as jnp

from jaxtrain_kernels.precision import accumulator
from jaxtrain_kernels.recurrence import gpu_conv


def causal_conv(
    x: jax.Array,
    w: jax.Array,
    prev: jax.Array | None = None,
    tail: jax.Array | None = None,
    bias: jax.Array | None = None,
) -> jax.Array:
    """y_t = sum over j < W of w[:, W - 1 - j] * x[the token j before t on its branch] (+ bias);
    [B, T, F].

    x [B, T, F]; w [F, W], whose last tap meets the token itself; bias [F]. prev int32 [B, T]: the
    token before on the branch, -1 at a root, before which all is 0. prev None: the row is a chain,
    behind `tail` [B, W - 1, F] where that is given. Sums in the dtype of x, but at least float32.
    On an NVIDIA GPU the gradient of x is a kernel's (gpu_conv.py).
    """
    (B, T, F), W = x.shape, w.shape[1]
    wide = accumulator(x.dtype)
    w = w.astype(wide)
    if prev is None:
        if tail is None:
            tail = jnp.zeros((B, W - 1, F), x.dtype)
        longer = jnp.concatenate([tail.astype(x.dtype), x], axis=1).astype(wide)
        y = sum(longer[:, j : j + T] * w[None, None, :, j] for j in range(W))
        return _finish(y, bias, x.dtype)
    hops = gpu_conv.hops_of(prev, W) if x.dtype in gpu_conv.DTYPES else None
    if hops is not None:
        return _finish(gpu_conv.convolve(False, x, w, hops), bias, x.dtype)
    # A place more, of zeros, for what stands before the roots.
    longer = jnp.pad(x, ((0, 0), (0, 1), (0, 0)))
    before = jnp.where(prev < 0, T, prev)
    hop = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    y = x.astype(wide) * w[None, None, :, W - 1]
    for j in range(1, W):
        hop = jnp.take_along_axis(jnp.pad(before, ((0, 0), (0, 1)), constant_values=T), hop, 1)
        y += (
            jnp.take_along_axis(longer, hop[..., None], axis=1).astype(wide)
            * w[None, None, :, W - 1 - j]
        )
    return _finish(y, bias, x.dtype)


def _finish(y, bias, dtype):
    if bias is not None:
        y += bias.astype(y.dtype)[None, None]
    return y.astype(dtype)
