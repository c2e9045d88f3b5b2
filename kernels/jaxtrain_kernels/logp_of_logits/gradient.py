"""The gradient of logp_of_logits: every backend's forward with one backward.

One pass: an element's gradient needs its logit and five numbers of its row, so XLA's fusion reads
the logits once and writes the gradient once.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxtrain_kernels.logp_gather.reference import LogProbs
from jaxtrain_kernels.precision import accumulator


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def with_gradient(forward: Callable[..., LogProbs], logits, targets, temperature) -> LogProbs:
    """`forward(logits, targets, temperature)`, differentiable in the logits."""
    return forward(logits, targets, temperature)


def _fwd(forward, logits, targets, temperature):
    result = forward(logits, targets, temperature)
    return result, (logits, targets, temperature, result.entropy, result.lse)


def _bwd(forward, residuals, cotangents):
    """dz = g_logp (1[target] - p) - g_entropy p (log p + entropy) + g_lse p."""
    logits, targets, temperature, entropy, lse = residuals
    g_logp, g_entropy, g_lse = (g[:, None] for g in cotangents[:3])  # nothing tells `top`
    z_TV = logits.astype(accumulator(logits.dtype))
    if temperature is not None:
        z_TV = z_TV / temperature[:, None]
    logp_TV = z_TV - lse[:, None]
    # A logit of -inf has p = 0; a finite floor keeps 0 * -inf out.
    logp_TV = jnp.maximum(logp_TV, -1e30)
    dz_TV = jnp.exp(logp_TV) * (g_lse - g_logp - g_entropy * (logp_TV + entropy[:, None]))
    column = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    dz_TV += jnp.where(column == targets[:, None], g_logp, 0.0)
    if temperature is not None:
        dz_TV /= temperature[:, None]
    return dz_TV.astype(logits.dtype), None, None


with_gradient.defvjp(_fwd, _bwd)
