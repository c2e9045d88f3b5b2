"""The custom_vjp of all backends of weighted_logp: gradients saved, scaled when asked for."""

import functools
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain_kernels.logp_gather.reference import LogProbs
from jaxtrain_kernels.logp_gather.slices import Axis


class Backend(Protocol):
    """A hashable pair of forward passes."""

    axis: Axis
    freeze_head: bool

    def values(self, hidden, head, targets, temperature) -> LogProbs: ...

    def values_and_gradients(self, hidden, head, targets, weights, temperature):
        """(LogProbs, gradient of the sum by hidden, by head or None), in the inputs' dtypes."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def weighted(backend: Backend, hidden, head, targets, weights, temperature):
    """(sum of weights x log p, LogProbs)."""
    scores = backend.values(hidden, head, targets, temperature)
    return (weights * scores.logp).sum(), scores


def _fwd(backend, hidden, head, targets, weights, temperature):
    scores, d_hidden, d_head = backend.values_and_gradients(
        hidden, head, targets, weights, temperature
    )
    return ((weights * scores.logp).sum(), scores), (scores.logp, d_hidden, d_head, head)


def _bwd(backend, residuals, cotangents):
    logp, d_hidden, d_head, head = residuals
    g, _ = cotangents  # the LogProbs carry no gradient
    d_weights = g * logp
    if backend.axis is not None:
        # Every device of the axis returned the same sum and was handed its share of g.
        g = lax.psum(g, backend.axis)
    d_hidden = (g * d_hidden.astype(g.dtype)).astype(d_hidden.dtype)
    if backend.freeze_head:
        return d_hidden, jnp.zeros_like(head), None, d_weights, None
    return d_hidden, (g * d_head.astype(g.dtype)).astype(d_head.dtype), None, d_weights, None


weighted.defvjp(_fwd, _bwd)
