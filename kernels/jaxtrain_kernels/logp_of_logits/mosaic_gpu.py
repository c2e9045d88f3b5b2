"""The Hopper backend of logp_of_logits: what it takes, and how the parts of a row are merged."""

import functools

import jax.numpy as jnp

from jaxtrain_kernels.logp_gather.gpu import merge
from jaxtrain_kernels.logp_gather.reference import LogProbs
from jaxtrain_kernels.logp_of_logits import gpu
from jaxtrain_kernels.logp_of_logits.gradient import with_gradient
from jaxtrain_kernels.mosaic import require_hopper


def logp_of_logits(logits, targets, *, temperature=None):
    """See `jaxtrain_kernels.logp_of_logits`; bfloat16, T a multiple of 8, V of 64."""
    require_hopper()
    T, V = logits.shape
    config = gpu.heuristic(V)
    if logits.dtype != jnp.bfloat16:
        raise NotImplementedError(f"takes bfloat16 logits, got {logits.dtype}")
    if T % 8 or T < gpu.ROWS:
        raise NotImplementedError(f"{T} rows must be a multiple of 8 and at least {gpu.ROWS}")
    if V % gpu.WIDTH or V < config.columns:
        raise NotImplementedError(
            f"the vocabulary, {V}, must be a multiple of {gpu.WIDTH} and at least {config.columns}"
        )
    return logp_of_logits_with(config, logits, targets, temperature)


def logp_of_logits_with(config: gpu.Config, logits, targets, temperature):
    """`logp_of_logits` behind its checks."""
    return with_gradient(functools.partial(run, config), logits, targets, temperature)


def run(config, logits, targets, temperature):
    """The values: the kernel and the merge of its parts."""
    T = logits.shape[0]
    inverse = jnp.ones((T,), jnp.float32) if temperature is None else 1.0 / temperature
    lse, entropy = merge(*gpu.statistics(logits, inverse * gpu.LOG2E, config=config))
    target = jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0].astype(jnp.float32)
    return LogProbs(target * inverse - lse, entropy, lse)
