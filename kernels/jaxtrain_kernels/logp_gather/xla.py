"""logp_gather in plain XLA: a scan over chunks of the vocabulary, forward and backward.

The forward keeps four numbers per token: maximum, sum of p, sum of p z (both relative to the
maximum, so that the entropy is no difference of large numbers) and the target's logit. The backward
recomputes each chunk's logits; a chunk owns its rows of the head, so their gradient is written once
and only d_hidden [T, D] accumulates. Chunks of tokens instead would re-read and re-write a whole
float32 head gradient at every step.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain_kernels.logp_gather.reference import LogProbs
from jaxtrain_kernels.precision import accumulator

ONE_CHUNK = 2**22  # logits; below, all of them at once is both small and fastest
CHUNK = 8192  # vocabulary rows: large enough for matmuls at full rate
MAX_LOGITS = 2**27  # logits alive at once (512 MiB in float32)


class Options(NamedTuple):
    """Static parameters of the program, besides shapes."""

    softcap: float | None
    freeze_head: bool
    chunk: int


def logp_gather(
    hidden, head, targets, *, temperature=None, softcap=None, freeze_head=False, chunk=None
):
    """Implement `jaxtrain_kernels.logp_gather`; `chunk` overrides the vocabulary rows of a
    chunk."""
    if chunk is None:
        chunk = choose_chunk(hidden.shape[0], head.shape[0])
    options = Options(softcap, freeze_head, chunk)
    return _logp_gather(options, hidden, head, targets, temperature)


def choose_chunk(T: int, V: int) -> int:
    """Vocabulary rows per chunk: all of a small problem, else a divisor of V near CHUNK.

    Without a fitting divisor the last chunk is shorter.
    """
    if T * V <= ONE_CHUNK:
        return V
    most = max(512, MAX_LOGITS // T)
    target = min(max(CHUNK, ONE_CHUNK // T), most)
    fewest = -(-V // min(target * 5 // 4, most))
    for chunks in range(fewest, 2 * fewest + 1):
        if V % (8 * chunks) == 0:  # whole 16-byte pieces for the matrix units
            return V // chunks
    return min(V, target)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _logp_gather(options, hidden, head, targets, temperature):
    return _forward(options, hidden, head, targets, temperature)


def _forward(options, hidden, head, targets, temperature):
    T = hidden.shape[0]
    compute = accumulator(hidden.dtype)

    def body(carry, chunk):
        top, total, moment, target_logit = carry
        head_CD, first = chunk
        z_TC, _ = _logits(options, hidden, head_CD, temperature)
        new_top = jnp.maximum(top, z_TC.max(-1))
        shift, z_shifted_TC = top - new_top, z_TC - new_top[:, None]
        decay, weight_TC = jnp.exp(shift), jnp.exp(z_shifted_TC)
        # The entropy's sum of w log w moves with the maximum: log w changes by `shift`.
        moment = (moment + total * shift) * decay + (weight_TC * z_shifted_TC).sum(-1)
        total = total * decay + weight_TC.sum(-1)
        hit_TC = _hits(targets, first, head_CD.shape[0])
        target_logit += jnp.where(hit_TC, z_TC, 0.0).sum(-1)
        return (new_top, total, moment, target_logit), None

    zeros = jnp.zeros((T,), compute)
    lowest = jnp.full((T,), jnp.finfo(compute).min / 2, compute)  # finite: 0 * shift must be 0
    carry = (lowest, zeros, zeros, zeros)
    carry, _ = _scan(body, carry, head, options.chunk)
    top, total, moment, target_logit = carry
    log_total = jnp.log(total)
    lse = top + log_total
    return LogProbs(target_logit - lse, log_total - moment / total, lse, top - lse)


def _logp_gather_fwd(options, hidden, head, targets, temperature):
    result = _forward(options, hidden, head, targets, temperature)
    return result, (hidden, head, targets, temperature, result.entropy, result.lse)


def _logp_gather_bwd(options, residuals, cotangents):
    """dz = g_logp (1[target] - p) - g_entropy p (log p + entropy) + g_lse p, then the chain."""
    hidden, head, targets, temperature, entropy, lse = residuals
    g_logp, g_entropy, g_lse = (g[:, None] for g in cotangents[:3])
    compute = lse.dtype

    def body(d_hidden, chunk):
        head_CD, first = chunk
        z_TC, capped_TC = _logits(options, hidden, head_CD, temperature)
        logp_TC = z_TC - lse[:, None]
        p_TC = jnp.exp(logp_TC)
        dz_TC = p_TC * (g_lse - g_logp - g_entropy * (logp_TC + entropy[:, None]))
        dz_TC += jnp.where(_hits(targets, first, head_CD.shape[0]), g_logp, 0.0)
        if temperature is not None:
            dz_TC /= temperature[:, None]
        if options.softcap is not None:
            dz_TC *= 1.0 - jnp.square(capped_TC / options.softcap)
        # Rounded once, before both matmuls, as autodiff of a matmul in this dtype would.
        dz_TC = dz_TC.astype(hidden.dtype)
        d_hidden += _matmul("TC,CD->TD", dz_TC, head_CD.astype(hidden.dtype), compute)
        if options.freeze_head:
            return d_hidden, None
        return d_hidden, _matmul("TC,TD->CD", dz_TC, hidden, compute).astype(head.dtype)

    d_hidden, d_head = _scan(body, jnp.zeros(hidden.shape, compute), head, options.chunk)
    return d_hidden.astype(hidden.dtype), d_head, None, None


_logp_gather.defvjp(_logp_gather_fwd, _logp_gather_bwd)


def _logits(options, hidden, head_CD, temperature):
    """A chunk's logits [T, C] after softcap and temperature, and after softcap alone."""
    compute = accumulator(hidden.dtype)
    capped = _matmul("TD,CD->TC", hidden, head_CD.astype(hidden.dtype), compute)
    if options.softcap is not None:
        capped = options.softcap * jnp.tanh(capped / options.softcap)
    return capped if temperature is None else capped / temperature[:, None], capped


def _matmul(spec, lhs, rhs, compute):
    return jnp.einsum(spec, lhs, rhs, preferred_element_type=compute)


def _hits(targets, first, size):
    """bool [T, C]: is this vocabulary row the token's target?"""
    return targets[:, None] == first + jnp.arange(size, dtype=jnp.int32)[None]


def _scan(body, carry, head, chunk):
    """Run `body` over the head's chunks and join what it returns per row of the head (or None)."""
    V, D = head.shape
    full = V // chunk
    rows = []
    if full == 1:
        carry, piece = body(carry, (head[:chunk], jnp.int32(0)))
        rows.append(piece)
    elif full:
        firsts = jnp.arange(full, dtype=jnp.int32) * chunk
        head_NCD = head[: full * chunk].reshape(full, chunk, D)
        carry, pieces = lax.scan(body, carry, (head_NCD, firsts))
        rows.append(None if pieces is None else pieces.reshape(full * chunk, D))
    if V % chunk:
        carry, piece = body(carry, (head[full * chunk :], jnp.int32(full * chunk)))
        rows.append(piece)
    return carry, None if rows[0] is None else jnp.concatenate(rows)
