"""The definition of logp_of_logits: log_softmax in the accumulator's dtype, plain autodiff."""

import jax
import jax.numpy as jnp

from jaxtrain_kernels.logp_gather.reference import LogProbs
from jaxtrain_kernels.precision import accumulator


def logp_of_logits(logits, targets, *, temperature=None):
    """See `jaxtrain_kernels.logp_of_logits`."""
    z_TV = logits.astype(accumulator(logits.dtype))
    if temperature is not None:
        z_TV = z_TV / temperature[:, None]
    lse_T = jax.nn.logsumexp(z_TV, axis=-1)
    logp_TV = z_TV - lse_T[:, None]
    logp_T = jnp.take_along_axis(logp_TV, targets[:, None], axis=-1)[:, 0]
    surprise_TV = jnp.where(logp_TV == -jnp.inf, 0.0, logp_TV)  # 0 log 0 is 0
    entropy_T = -jnp.sum(jnp.exp(logp_TV) * surprise_TV, axis=-1)
    return LogProbs(logp_T, entropy_T, lse_T)
