"""Preprocessing of Qwen3-Next's linear attention on its projection: a causal convolution along
branches, silu, and queries and keys to unit length, out of the product that they lie in."""

import jax
import jax.numpy as jnp

from jaxtrain_kernels.conv_heads import gpu, reference, xla
from jaxtrain_kernels.dispatch import dispatch
from jaxtrain_kernels.recurrence.gpu_conv import hops_of
from jaxtrain_kernels.recurrence.hops import Hops

__all__ = ["Hops", "conv_heads", "hops_of"]

BACKENDS = {"gpu": gpu.conv_heads, "xla": xla.conv_heads, "reference": reference.conv_heads}


def conv_heads(
    x: jax.Array,
    w: jax.Array,
    key_dim: int,
    value_dim: int,
    prev: jax.Array | None = None,
    *,
    tail: jax.Array | None = None,
    hops: Hops | None = None,
    eps: float = 1e-6,
    impl: str = "auto",
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(q [B, T, H, K], k [B, T, H, K], v [B, T, N, V]) in x's dtype.

    x [B, T, H F or more]: of each of H key heads K = `key_dim` columns of queries, K of keys and
    those of its values, any number of heads of V = `value_dim`; N is that of all. Columns behind
    these are not read: x may be a product that holds more, which is read in place. w [H, F, W]: the
    taps of each column, the last of which meets the token itself (`causal_conv`). Behind the
    convolution is a silu; keys come out with length 1, x / sqrt(sum(x^2) + eps), and queries with
    length 1 / sqrt(K). prev int32 [B, T]: the token before on the branch, -1 at a root. None: each
    row is a chain behind `tail` [B, W - 1, H, F], or behind zeros. hops: `hops_of(prev, W)`, which
    layers of the same rows share; None: found here. Gradients flow to x and w.
    Raises ValueError for shapes that do not fit, NotImplementedError if `impl` declines.
    """
    (B, T, C), (H, F, taps) = x.shape, w.shape
    if C < H * F or F <= 2 * key_dim or (F - 2 * key_dim) % value_dim:
        raise ValueError(
            f"conv_heads: x {x.shape} and w {w.shape} do not hold {key_dim} + {key_dim} columns and"
            f" whole heads of {value_dim}"
        )
    if prev is not None and (prev.shape != (B, T) or prev.dtype != jnp.int32 or tail is not None):
        raise ValueError(f"conv_heads: prev is {prev.dtype}{prev.shape}; want int32 and no tail")
    if tail is not None and tail.shape != (B, taps - 1, H, F):
        raise ValueError(f"conv_heads: tail {tail.shape}; want {(B, taps - 1, H, F)}")
    arguments = (x, w, key_dim, value_dim, prev)
    return dispatch("conv_heads", impl, BACKENDS, *arguments, tail=tail, hops=hops, eps=eps)
