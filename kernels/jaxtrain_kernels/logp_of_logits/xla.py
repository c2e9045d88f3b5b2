"""logp_of_logits in plain XLA: a pass for the maxima and one for the sums."""

import jax.numpy as jnp

from jaxtrain_kernels.logp_gather.reference import LogProbs
from jaxtrain_kernels.logp_of_logits.gradient import with_gradient
from jaxtrain_kernels.precision import accumulator


def logp_of_logits(logits, targets, *, temperature=None):
    """See `jaxtrain_kernels.logp_of_logits`."""
    return with_gradient(_forward, logits, targets, temperature)


def _forward(logits, targets, temperature):
    z_TV = logits.astype(accumulator(logits.dtype))
    if temperature is not None:
        z_TV = z_TV / temperature[:, None]
    top = z_TV.max(-1)
    shifted_TV = jnp.maximum(z_TV - top[:, None], -1e30)  # finite: 0 * -inf must be 0
    weight_TV = jnp.exp(shifted_TV)
    total, moment = weight_TV.sum(-1), (weight_TV * shifted_TV).sum(-1)
    target = jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0].astype(z_TV.dtype)
    if temperature is not None:
        target = target / temperature
    log_total = jnp.log(total)
    lse = top + log_total
    return LogProbs(target - lse, log_total - moment / total, lse)
