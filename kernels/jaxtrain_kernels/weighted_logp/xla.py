"""weighted_logp in plain XLA: all logits at once where they are few, else `logp_gather`.

Rows in chunks would add to a whole head gradient per chunk, which costs more than computing logits
twice once a chunk has few rows; so beyond one chunk the vocabulary is walked instead.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from jaxtrain_kernels.logp_gather import xla as gather
from jaxtrain_kernels.logp_gather.reference import LogProbs
from jaxtrain_kernels.logp_gather.slices import Axis, across, join, local_targets
from jaxtrain_kernels.precision import accumulator
from jaxtrain_kernels.weighted_logp.gradient import weighted


class XlaBackend(NamedTuple):
    """Static parameters of the program, besides shapes."""

    softcap: float | None
    freeze_head: bool
    axis: Axis

    def values(self, hidden, head, targets, temperature):
        return _softmax(self, hidden, head, targets, temperature)[0]

    def values_and_gradients(self, hidden, head, targets, weights, temperature):
        scores, p_TV, slope_TV = _softmax(self, hidden, head, targets, temperature)
        local, is_local = local_targets(targets, head.shape[0], self.axis)
        hit_TV = local[:, None] == jnp.arange(head.shape[0], dtype=jnp.int32)[None]
        hit_TV &= is_local[:, None]
        dz_TV = (jnp.where(hit_TV, 1.0, 0.0) - p_TV) * weights[:, None] * slope_TV
        dz_TV = dz_TV.astype(hidden.dtype)
        low, compute = head.astype(hidden.dtype), p_TV.dtype
        d_hidden = jnp.einsum("TV,VD->TD", dz_TV, low, preferred_element_type=compute)
        d_hidden = d_hidden.astype(hidden.dtype)
        if self.freeze_head:
            return scores, d_hidden, None
        d_head = jnp.einsum("TV,TD->VD", dz_TV, hidden, preferred_element_type=compute)
        return scores, d_hidden, d_head.astype(head.dtype)


def weighted_logp(
    hidden, head, targets, weights, *, temperature=None, softcap=None, freeze_head=False, axis=None
):
    """Implement `jaxtrain_kernels.weighted_logp`."""
    if hidden.shape[0] * head.shape[0] > gather.MAX_LOGITS:
        local, is_local = local_targets(targets, head.shape[0], axis)
        scores = gather.logp_gather(
            hidden,
            head,
            jnp.where(is_local, local, 0),
            temperature=temperature,
            softcap=softcap,
            freeze_head=freeze_head,
        )
        scores = scores if axis is None else join(scores, is_local, axis)
        return (weights * scores.logp).sum(), scores
    # One backward serves all backends: see gradient.py.
    backend = XlaBackend(softcap, freeze_head, axis)
    return weighted(backend, hidden, head, targets, weights, temperature)


def _softmax(backend, hidden, head, targets, temperature):
    """LogProbs, p [T, V] and dz/d(raw logit), which broadcasts to [T, V]."""
    compute = accumulator(hidden.dtype)
    low = head.astype(hidden.dtype)
    z_TV = jnp.einsum("TD,VD->TV", hidden, low, preferred_element_type=compute)
    slope = jnp.ones((1, 1), compute)
    if backend.softcap is not None:
        capped = jnp.tanh(z_TV / backend.softcap)
        z_TV, slope = backend.softcap * capped, 1.0 - jnp.square(capped)
    if temperature is not None:
        z_TV, slope = z_TV / temperature[:, None], slope / temperature[:, None]
    local, is_local = local_targets(targets, head.shape[0], backend.axis)
    z_target = jnp.take_along_axis(z_TV, jnp.where(is_local, local, 0)[:, None], axis=1)[:, 0]
    z_target = across(lax.psum, jnp.where(is_local, z_target, 0.0), backend.axis)
    top = across(lax.pmax, z_TV.max(1), backend.axis)
    shifted_TV = z_TV - top[:, None]
    w_TV = jnp.exp(shifted_TV)
    total = across(lax.psum, w_TV.sum(1), backend.axis)
    moment = across(lax.psum, (w_TV * shifted_TV).sum(1), backend.axis)
    log_total = jnp.log(total)
    lse = top + log_total
    scores = LogProbs(z_target - lse, log_total - moment / total, lse, top - lse)
    return scores, w_TV / total[:, None], slope
