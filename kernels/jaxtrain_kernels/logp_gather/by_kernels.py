"""logp_gather on kernels that make [T, V] tile by tile: padding, chunks of the backward, its vjp.

The forward writes three numbers per token and vocabulary tile and merges them. The backward walks
the vocabulary in chunks: one kernel recomputes a chunk's logits and writes their gradient in the
dtype of the states, two plain matmuls take it to the hidden states and to the head.
"""

import functools
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain_kernels.logp_gather.gpu import LOG2E, merge
from jaxtrain_kernels.logp_gather.reference import LogProbs

NEAR = 2.0**-8  # log-probs closer than the rounding of bfloat16 count as equal
CHUNK_LOGITS = 2**27  # gradients of logits alive at once (256 MiB in bfloat16)


class Options(NamedTuple):
    """Static parameters of the kernels, besides shapes."""

    softcap: float | None
    freeze_head: bool
    chunk: int
    config: Any
    kernels: ModuleType
    """TILE_T, `statistics` and `d_logits` as in `logp_gather.gpu`, with its kind of config."""


def choose_chunk(T: int, V: int, tile: int) -> int:
    """Vocabulary rows of a chunk of the backward: whole tiles; the last chunk has the rest.

    The kernel needs at least a tile, so the rest must be nothing or a tile and more.
    """
    chunk = max(tile, CHUNK_LOGITS // T // tile * tile)
    while chunk < V and 0 < V % chunk < tile:
        chunk += tile
    return min(chunk, V)


def run(options, hidden, head, targets, temperature):
    """`logp_gather` behind its checks: pads the tokens to whole tiles and calls the kernels."""
    T = hidden.shape[0]
    factor = jnp.full((T,), LOG2E, jnp.float32)
    if temperature is not None:
        factor = factor / temperature.astype(jnp.float32)
    missing = -T % options.kernels.TILE_T
    if missing:
        hidden = jnp.pad(hidden, ((0, missing), (0, 0)))
        targets = jnp.pad(targets, (0, missing))
        factor = jnp.pad(factor, (0, missing), constant_values=1.0)
    result = _logp_gather(options, hidden, head, targets, factor)
    return LogProbs(*(x[:T] for x in result))


def target_logits(hidden, head, targets, softcap):
    """float32 [T]: the logit of each row's target, after softcap."""
    z = jnp.einsum("TD,TD->T", hidden, head[targets], preferred_element_type=jnp.float32)
    return z if softcap is None else softcap * jnp.tanh(z / softcap)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _logp_gather(options, hidden, head, targets, factor):
    return _forward(options, hidden, head, targets, factor)


def _forward(options, hidden, head, targets, factor):
    low = head.astype(hidden.dtype)
    statistics, settings = options.kernels.statistics, {"softcap": options.softcap}
    pieces = statistics(hidden, low, factor, config=options.config, **settings)
    lse, entropy = merge(*pieces)
    logit = target_logits(hidden, low, targets, options.softcap) * factor / LOG2E
    logp, top = logit - lse, pieces[0].max(0) / LOG2E - lse
    # The target's logit comes from another product, summed in another order.
    return LogProbs(logp, entropy, lse, jnp.where(logp >= top - NEAR, logp, top))


def _logp_gather_fwd(options, hidden, head, targets, factor):
    result = _forward(options, hidden, head, targets, factor)
    return result, (hidden, head, targets, factor, result)


def _logp_gather_bwd(options, residuals, cotangents):
    """dz = g_logp (1[target] - p) - g_entropy p (log p + entropy) + g_lse p, then the chain."""
    hidden, head, targets, factor, result = residuals
    g_logp, g_entropy, g_lse, _ = cotangents
    low = head.astype(hidden.dtype)
    V, D = head.shape
    chunk = options.chunk
    inverse = factor / LOG2E
    slope = (g_lse - g_logp - g_entropy * result.entropy) * inverse
    slopes = (slope, g_entropy * inverse / LOG2E)
    # The target's own element, from float32 numbers: p near 1 must not cost 1 - p its accuracy.
    on_target = jnp.exp(result.logp) * (slope - g_entropy * result.logp * inverse)
    on_target += g_logp * inverse
    if options.softcap is not None:
        capped = (result.logp + result.lse) / inverse
        on_target *= 1.0 - jnp.square(capped / options.softcap)
    row = jnp.arange(hidden.shape[0], dtype=jnp.int32)

    def body(carry, first, size):
        d_hidden, d_head = carry
        dz_TC = options.kernels.d_logits(
            hidden,
            low,
            factor,
            result.lse * LOG2E,
            slopes,
            first[None],
            size,
            softcap=options.softcap,
            config=options.config,
        )
        column = targets - first
        column = jnp.where(column < 0, size, column)  # negative indices would count from the end
        dz_TC = dz_TC.at[row, column].set(
            on_target.astype(dz_TC.dtype), mode="drop", unique_indices=True
        )
        head_CD = lax.dynamic_slice(low, (first, jnp.int32(0)), (size, D))
        d_hidden += jnp.einsum("TC,CD->TD", dz_TC, head_CD, preferred_element_type=jnp.float32)
        if d_head is not None:
            piece = jnp.einsum("TC,TD->CD", dz_TC, hidden, preferred_element_type=head.dtype)
            d_head = lax.dynamic_update_slice(d_head, piece, (first, jnp.int32(0)))
        return d_hidden, d_head

    carry = (
        jnp.zeros(hidden.shape, jnp.float32),
        None if options.freeze_head else jnp.zeros(head.shape, head.dtype),
    )
    full, rest = divmod(V, chunk)
    firsts = jnp.arange(full, dtype=jnp.int32) * chunk
    carry, _ = lax.scan(lambda carry, first: (body(carry, first, chunk), None), carry, firsts)
    if rest:
        carry = body(carry, jnp.int32(full * chunk), rest)
    d_hidden, d_head = carry
    return d_hidden.astype(hidden.dtype), d_head, None, None


_logp_gather.defvjp(_logp_gather_fwd, _logp_gather_bwd)
