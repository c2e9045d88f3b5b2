"""The Hopper backend of logp_gather: what it takes."""

import jax.numpy as jnp

from jaxtrain_kernels.logp_gather import gpu
from jaxtrain_kernels.logp_gather.by_kernels import Options, choose_chunk, run
from jaxtrain_kernels.mosaic import require_hopper


def logp_gather(hidden, head, targets, *, temperature=None, softcap=None, freeze_head=False):
    """Implement `jaxtrain_kernels.logp_gather`; bfloat16 states, D and V multiples of 64."""
    require_hopper()
    T, V = hidden.shape[0], head.shape[0]
    config = gpu.Config()
    require_shapes(hidden, V, config)
    options = Options(softcap, freeze_head, choose_chunk(T, V, config.tile_v), config, gpu)
    return run(options, hidden, head, targets, temperature)


def require_shapes(hidden, V: int, config: gpu.Config) -> None:
    """Raise NotImplementedError with the reason unless the kernels take these."""
    D = hidden.shape[1]
    if hidden.dtype != jnp.bfloat16:
        raise NotImplementedError(f"takes bfloat16 hidden states, got {hidden.dtype}")
    if D % config.block_d or V % config.store or V < config.tile_v:
        raise NotImplementedError(
            f"width {D} must be a multiple of {config.block_d}; the vocabulary, {V}, one of "
            f"{config.store} and at least {config.tile_v}"
        )
