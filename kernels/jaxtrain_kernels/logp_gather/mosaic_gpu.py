"""The Hopper backend of logp_gather: what it takes, padding, chunks of the backward, its vjp.

The forward writes four numbers per token and vocabulary tile and merges them. The backward walks
the vocabulary in chunks: one kernel recomputes a chunk's logits and writes their gradient in
bfloat16, two plain matmuls take it to the hidden states and to the head.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain_kernels.logp_gather import gpu
from jaxtrain_kernels.logp_gather.reference import LogProbs
from jaxtrain_kernels.mosaic import require_hopper

CHUNK_LOGITS = 2**27  # gradients of logits alive at once (256 MiB in bfloat16)


class Options(NamedTuple):
    """What the kernels are compiled for, beside shapes."""

    softcap: float | None
    freeze_head: bool
    chunk: int
    config: gpu.Config


def logp_gather(hidden, head, targets, *, temperature=None, softcap=None, freeze_head=False):
    """See `jaxtrain_kernels.logp_gather`; bfloat16 states, D and V multiples of 64."""
    require_hopper()
    T, V = hidden.shape[0], head.shape[0]
    config = gpu.Config()
    require_shapes(hidden, V, config)
    options = Options(softcap, freeze_head, choose_chunk(T, V, config.tile_v), config)
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
    missing = -T % gpu.TILE_T
    if missing:
        hidden = jnp.pad(hidden, ((0, missing), (0, 0)))
        targets = jnp.pad(targets, (0, missing), constant_values=-1)
        if temperature is not None:
            temperature = jnp.pad(temperature, (0, missing), constant_values=1.0)
    if temperature is not None:
        temperature = temperature.astype(jnp.float32)
    result = _logp_gather(options, hidden, head, targets, temperature)
    return LogProbs(*(x[:T] for x in result))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _logp_gather(options, hidden, head, targets, temperature):
    return _forward(options, hidden, head, targets, temperature)


def _forward(options, hidden, head, targets, temperature):
    pieces = gpu.statistics(
        hidden,
        head.astype(hidden.dtype),
        targets,
        temperature,
        softcap=options.softcap,
        config=options.config,
    )
    top, total, moment, hit = pieces
    highest = top.max(0)
    shift = top - highest[None]
    decay = jnp.exp(shift)
    moment = ((moment + total * shift) * decay).sum(0)
    total = (total * decay).sum(0)
    log_total = jnp.log(total)
    lse = highest + log_total
    return LogProbs(hit.sum(0) - lse, log_total - moment / total, lse)


def _logp_gather_fwd(options, hidden, head, targets, temperature):
    result = _forward(options, hidden, head, targets, temperature)
    return result, (hidden, head, targets, temperature, result)


def _logp_gather_bwd(options, residuals, cotangents):
    hidden, head, targets, temperature, result = residuals
    low = head.astype(hidden.dtype)
    V, D = head.shape
    chunk = options.chunk

    def body(carry, first, size):
        d_hidden, d_head = carry
        dz_TC = gpu.d_logits(
            hidden,
            low,
            targets,
            temperature,
            result.lse,
            result.entropy,
            tuple(cotangents),
            first[None],
            size,
            softcap=options.softcap,
            config=options.config,
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
