"""The Triton backend of weighted_logp: what it takes."""

import jax.numpy as jnp

from jaxtrain_kernels.logp_gather import triton_gpu
from jaxtrain_kernels.triton_call import require_triton
from jaxtrain_kernels.weighted_logp.by_kernels import KernelBackend, choose_rows, choose_splits
from jaxtrain_kernels.weighted_logp.gradient import weighted


def weighted_logp(
    hidden, head, targets, weights, *, temperature=None, softcap=None, freeze_head=False, axis=None
):
    """Implement `jaxtrain_kernels.weighted_logp`; bfloat16 states, D a multiple of 16."""
    require_triton()
    (T, D), V = hidden.shape, head.shape[0]
    # The guess of a row's maximum wants exponents that float16 does not have.
    triton_gpu.require_shapes(hidden, (jnp.bfloat16,))
    rows, splits = choose_rows(T, D, V, triton_gpu.TILE_T), choose_splits(T, D, V)
    config = triton_gpu.choose(rows, D, V)
    backend = KernelBackend(softcap, freeze_head, axis, rows, splits, config, triton_gpu)
    return weighted(backend, hidden, head, targets, weights, temperature)
