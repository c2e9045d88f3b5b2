"""The Hopper backend of rotate_heads: what it takes, and its vjp."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain_kernels.autotune import tuned
from jaxtrain_kernels.mosaic import require_hopper
from jaxtrain_kernels.rotate_heads import gpu

FEW = 512  # tokens: below, as in decoding, XLA's fusions cost no more than a launch
TABLE = "rotate_heads"  # of tuned configs
HEAD_DIMS = (64, 128)  # registers hold no more of a token's angles and sums


def rotate_heads(x, cos, sin, counts, head_dim, scales=None, *, eps):
    """Implement `jaxtrain_kernels.rotate_heads`; bfloat16, B T a multiple of 64, float32 angles."""
    require_hopper()
    if x.dtype != jnp.bfloat16 or cos.dtype != jnp.float32:
        raise NotImplementedError(
            f"takes bfloat16 and float32 angles, got {x.dtype} and {cos.dtype}"
        )
    tokens, half = x.shape[0] * x.shape[1], cos.shape[-1]
    if tokens % gpu.ROWS or tokens < FEW:
        raise NotImplementedError(
            f"{tokens} tokens must be a multiple of {gpu.ROWS} and at least {FEW}"
        )
    if head_dim not in HEAD_DIMS:
        raise NotImplementedError(f"head dim {head_dim} is none of {HEAD_DIMS}")
    if half % 32:
        raise NotImplementedError(f"{2 * half} rotated dims are no multiple of 64")
    rest = x.shape[-1] // head_dim - sum(counts)
    heads = gpu.Heads(tuple(counts), rest, head_dim, half)
    config = tuned(TABLE, gpu.Config(), near={"tokens": tokens}, head_dim=head_dim)
    return rotate_heads_with(config, heads, x, cos, sin, scales, eps)


def rotate_heads_with(config: gpu.Config, heads: gpu.Heads, x, cos, sin, scales, eps):
    """`rotate_heads` behind its checks."""
    lead, M = x.shape[:2], x.shape[0] * x.shape[1]
    if scales is not None:
        scales = jnp.stack([scale.astype(jnp.float32) for scale in scales])
    cos, sin = (turn.reshape(M, heads.half) for turn in (cos, sin))
    outs = _rotate(config, heads, eps, x.reshape(M, -1), cos, sin, scales)
    return tuple(out.reshape(*lead, -1, heads.head_dim) for out in outs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _rotate(config, heads, eps, x, cos, sin, scales):
    return _rotate_fwd(config, heads, eps, x, cos, sin, scales)[0]


def _rotate_fwd(config, heads, eps, x, cos, sin, scales):
    if scales is not None:  # rounded as the definition does; the kernels multiply in float32
        scales = scales.astype(x.dtype).astype(jnp.float32)
    outs = gpu.forward(x, cos, sin, scales, heads, eps=eps, config=config)
    # In a loop XLA would run the kernel twice: for its results, and into the stack of all layers'.
    return lax.optimization_barrier(outs), (x, cos, sin, scales)


def _rotate_bwd(config, heads, eps, residuals, d_outs):
    dx, d_scales = gpu.backward(d_outs, *residuals, heads, eps=eps, config=config)
    return dx, None, None, d_scales


_rotate.defvjp(_rotate_fwd, _rotate_bwd)
