"""The definition of logp_gather: all logits, log_softmax, plain autodiff."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain_kernels.precision import accumulator


class LogProbs(NamedTuple):
    """Per-token results, float32 [T]."""

    logp: jax.Array
    """log p(target)."""
    entropy: jax.Array
    """Of the whole distribution, in nats."""
    lse: jax.Array
    """log-sum-exp of the logits after softcap and temperature."""
    top: jax.Array | None = None
    """log p of the likeliest token, without gradient: the target is one of those iff logp >= top
    (Hopper kernels: to within bfloat16). None where an op does not tell."""


def logp_gather(hidden, head, targets, *, temperature=None, softcap=None, freeze_head=False):
    """Implement `jaxtrain_kernels.logp_gather`. Holds [T, V] logits: for tests and tiny inputs."""
    del freeze_head  # the caller has stopped the head's gradient already
    compute = accumulator(hidden.dtype)
    logits_TV = jnp.einsum(
        "TD,VD->TV", hidden, head.astype(hidden.dtype), preferred_element_type=compute
    )
    if softcap is not None:
        logits_TV = softcap * jnp.tanh(logits_TV / softcap)
    if temperature is not None:
        logits_TV = logits_TV / temperature[:, None]
    lse_T = jax.nn.logsumexp(logits_TV, axis=-1)
    logp_TV = logits_TV - lse_T[:, None]
    logp_T = jnp.take_along_axis(logp_TV, targets[:, None], axis=-1)[:, 0]
    entropy_T = -(jnp.exp(logp_TV) * logp_TV).sum(-1)
    return LogProbs(logp_T, entropy_T, lse_T, jax.lax.stop_gradient(logp_TV.max(-1)))
