"""The Triton backend of logp_of_logits: what it takes, and one pass over the logits.

A program reads a part of one row, a tile at a time: one maximum a tile, one exponential a logit.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jaxtrain_kernels.autotune import tuned
from jaxtrain_kernels.logp_gather.gpu import LOG2E, merge
from jaxtrain_kernels.logp_gather.reference import LogProbs
from jaxtrain_kernels.logp_of_logits.gradient import with_gradient
from jaxtrain_kernels.mosaic import num_cores
from jaxtrain_kernels.triton_call import launch, require_triton

DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
TABLE = "logp_of_logits_triton"  # of tuned configs


@dataclasses.dataclass(frozen=True)
class Config:
    """How a call is cut up."""

    tile: int = 4096
    """Logits of a row that are read at a time."""
    programs: int = 16
    """At least so many on each core: rows are cut into parts where they are few."""
    warps: int = 8
    stages: int = 2


def logp_of_logits(logits, targets, *, temperature=None):
    """See `jaxtrain_kernels.logp_of_logits`; bfloat16, float16 or float32."""
    require_triton()
    if logits.dtype not in DTYPES:
        raise NotImplementedError(f"takes bfloat16, float16 or float32, got {logits.dtype}")
    T, V = logits.shape
    config = tuned(TABLE, Config(), near={"T": T, "V": V})
    return logp_of_logits_with(config, logits, targets, temperature)


def logp_of_logits_with(config: Config, logits, targets, temperature):
    """`logp_of_logits` behind its checks."""
    return with_gradient(functools.partial(run, config), logits, targets, temperature)


def run(config, logits, targets, temperature):
    """The values: the kernel and the merge of its parts."""
    T = logits.shape[0]
    inverse = jnp.ones((T,), jnp.float32) if temperature is None else 1.0 / temperature
    lse, entropy = merge(*statistics(logits, inverse * LOG2E, config=config))
    target = jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0].astype(jnp.float32)
    return LogProbs(target * inverse - lse, entropy, lse)


def statistics(logits, factor, *, config: Config):
    """float32 [3, parts, T]: see `logp_of_logits.gpu.statistics`; any T and V."""
    from jaxtrain_kernels.logp_of_logits import triton_kernels

    T, V = logits.shape
    tile = min(config.tile, 1 << (V - 1).bit_length())
    tiles = -(-V // tile)
    parts = min(tiles, -(-config.programs * num_cores() // T))
    length = -(-tiles // parts)
    parts = -(-tiles // length)
    return launch(
        triton_kernels.row_statistics,
        [logits, factor],
        jax.ShapeDtypeStruct((3, parts, T), jnp.float32),
        grid=T * parts,
        warps=config.warps,
        stages=config.stages,
        T=T,
        V=V,
        PARTS=parts,
        LENGTH=length,
        TILE=tile,
    )
