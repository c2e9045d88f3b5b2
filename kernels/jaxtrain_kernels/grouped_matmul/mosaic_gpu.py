"""The Hopper backend of grouped_matmul: what it takes, and its vjp."""

import functools

import jax
import jax.numpy as jnp

from jaxtrain_kernels.grouped_matmul import gpu
from jaxtrain_kernels.grouped_matmul.ffn import NO_ADAPTERS, Adapters, compose
from jaxtrain_kernels.mosaic import require_hopper


def grouped_matmul(x, w, segments, *, freeze_w=False):
    """See `jaxtrain_kernels.grouped_matmul`; bfloat16 rows, blocks of 128, D and F alike."""
    check(x.dtype, x.shape[0] // segments.group.shape[0], *w.shape[1:])
    return run(freeze_w, x, w, segments)


def grouped_ffn(x, gates, w_gate, w_up, w_down, segments, *, adapters, **options):
    """See `jaxtrain_kernels.moe_ffn`; as `grouped_matmul`, without adapters."""
    check(x.dtype, x.shape[0] // segments.group.shape[0], *w_gate.shape[1:], adapters)
    arrays = (x, gates, w_gate, w_up, w_down, segments)
    return compose(grouped_matmul, *arrays, adapters=adapters, **options)


def check(dtype, block: int, D: int, F: int, adapters: Adapters = NO_ADAPTERS) -> None:
    """Raise NotImplementedError with the reason unless the kernels take this."""
    require_hopper()
    if dtype != jnp.bfloat16:
        raise NotImplementedError(f"takes bfloat16 rows, got {dtype}")
    if block != gpu.BLOCK:
        raise NotImplementedError(f"takes blocks of {gpu.BLOCK} rows, got {block}")
    if gpu.fitting(D) is None or gpu.fitting(F) is None:
        raise NotImplementedError(f"{D} and {F} columns must be multiples of 128")
    if any(factors is not None for factors in adapters):
        raise NotImplementedError("takes no adapters")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def run(freeze_w, x, w, segments):
    """`grouped_matmul` behind its checks."""
    low = w.astype(x.dtype)
    config = gpu.fitting(w.shape[2])
    return gpu.product(x, low, segments.group, segments.active, transpose=False, config=config)


def _run_fwd(freeze_w, x, w, segments):
    return run(freeze_w, x, w, segments), (x, w, segments)


def _run_bwd(freeze_w, residuals, dy):
    x, w, segments = residuals
    low = w.astype(x.dtype)
    config = gpu.fitting(w.shape[1])
    dx = gpu.product(dy, low, segments.group, segments.active, transpose=True, config=config)
    if freeze_w:
        return dx, None, None
    config = gpu.fitting(w.shape[2])
    dw = gpu.weight_gradient(x, dy, segments.starts, segments.ends, config=config)
    return dx, dw.astype(w.dtype), None


run.defvjp(_run_fwd, _run_bwd)
