"""The Hopper backend of weighted_logp: what it takes."""

from jaxtrain_kernels.logp_gather import gpu
from jaxtrain_kernels.logp_gather.mosaic_gpu import require_shapes
from jaxtrain_kernels.mosaic import require_hopper
from jaxtrain_kernels.weighted_logp.by_kernels import KernelBackend, choose_rows, choose_splits
from jaxtrain_kernels.weighted_logp.gradient import weighted


def weighted_logp(
    hidden, head, targets, weights, *, temperature=None, softcap=None, freeze_head=False, axis=None
):
    """Implement `jaxtrain_kernels.weighted_logp`; bfloat16 states, D and V multiples of 64."""
    require_hopper()
    (T, D), V = hidden.shape, head.shape[0]
    config = gpu.Config()
    require_shapes(hidden, V, config)
    rows, splits = choose_rows(T, D, V, gpu.TILE_T), choose_splits(T, D, V)
    backend = KernelBackend(softcap, freeze_head, axis, rows, splits, config, gpu)
    return weighted(backend, hidden, head, targets, weights, temperature)
