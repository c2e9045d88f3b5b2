"""The Triton backend of logp_gather: what it takes, and its kernels behind the interface of
`logp_gather.gpu`, which `by_kernels` builds the op and `weighted_logp` on.

A program makes one tile of hidden @ head.T in registers and reduces it, or writes what the backward
multiplies on. Tokens and vocabulary need not be whole tiles.
"""

import dataclasses
import sys

import jax
import jax.numpy as jnp

from jaxtrain_kernels.autotune import tuned
from jaxtrain_kernels.logp_gather.by_kernels import Options, choose_chunk, run
from jaxtrain_kernels.triton_call import capability, fitting, launch, require_triton

DTYPES = (jnp.bfloat16, jnp.float16)
WIDTH = 16
TABLE = "logp_gather_triton"  # of tuned configs
TILE_T = 1  # callers pad tokens to a multiple of it


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of all three kernels."""

    tile_t: int = 128
    tile_v: int = 128
    block_d: int = 64
    """At most so much of the width in one step."""
    walk: int = 8
    """Token tiles that are walked before the next vocabulary tile: reuse in the L2 cache."""
    warps: int = 8
    stages: int = 3


def heuristic() -> Config:
    """By what each generation's matmuls read; nobody has timed it."""
    return Config() if capability() in (90, 100, 103) else Config(block_d=32, stages=4)


def choose(T: int, D: int, V: int) -> Config:
    """The device's tuned config or the heuristic, as tokens, width and shared memory allow."""
    config = tuned(TABLE, heuristic(), near={"T": T, "D": D, "V": V})
    step = min(config.block_d, D & -D)  # a power of two that divides the width
    tile_t = min(config.tile_t, max(16, 1 << (T - 1).bit_length()))
    stages = fitting(config.stages, 2 * step * (tile_t + config.tile_v))
    return dataclasses.replace(config, block_d=step, tile_t=tile_t, stages=stages)


def logp_gather(hidden, head, targets, *, temperature=None, softcap=None, freeze_head=False):
    """Implement `jaxtrain_kernels.logp_gather`; bfloat16 or float16 states, D a multiple of 16."""
    require_triton()
    (T, D), V = hidden.shape, head.shape[0]
    require_shapes(hidden, DTYPES)
    config = choose(T, D, V)
    chunk = choose_chunk(T, V, config.tile_v)
    options = Options(softcap, freeze_head, chunk, config, sys.modules[__name__])
    return run(options, hidden, head, targets, temperature)


def require_shapes(hidden, dtypes) -> None:
    """Raise NotImplementedError with the reason unless the kernels take these."""
    if hidden.dtype not in dtypes:
        names = " or ".join(str(jnp.dtype(d)) for d in dtypes)
        raise NotImplementedError(f"takes {names} hidden states, got {hidden.dtype}")
    if hidden.shape[1] % WIDTH:
        raise NotImplementedError(f"width {hidden.shape[1]} must be a multiple of {WIDTH}")


def statistics(hidden, head, factor, *, softcap: float | None, config: Config, active=None):
    """Compute `gpu.statistics` with Triton."""
    from jaxtrain_kernels.logp_gather import triton_kernels

    T, V = hidden.shape[0], head.shape[0]
    return _launch(
        triton_kernels.statistics,
        [hidden, head, factor, _flag(active)],
        jax.ShapeDtypeStruct((3, -(-V // config.tile_v), T), jnp.float32),
        (T, V),
        softcap,
        config,
    )


def exponentials(
    hidden, head, factor, base, *, softcap: float | None, config: Config, active=None, into=None
):
    """Compute `gpu.exponentials` with Triton."""
    from jaxtrain_kernels.logp_gather import triton_kernels

    T, V = hidden.shape[0], head.shape[0]
    arrays = [hidden, head, factor, base, _flag(active)]
    w_TV = jax.ShapeDtypeStruct((T, V), hidden.dtype)
    planes = 2 if softcap is None else 3
    sums = jax.ShapeDtypeStruct((planes, -(-V // config.tile_v), T), jnp.float32)
    if into is None:
        out_type = [w_TV, sums]
    else:
        arrays, out_type = [*arrays, into], sums
    return _launch(triton_kernels.exponentials, arrays, out_type, (T, V), softcap, config)


def d_logits(
    hidden, head, factor, base, slopes, first, size: int, *, softcap: float | None, config: Config
):
    """Compute `gpu.d_logits` with Triton, in the dtype of the states."""
    from jaxtrain_kernels.logp_gather import triton_kernels

    T = hidden.shape[0]
    return _launch(
        triton_kernels.d_logits,
        [hidden, head, first, factor, base, *slopes],
        jax.ShapeDtypeStruct((T, size), hidden.dtype),
        (T, size),
        softcap,
        config,
    )


def _flag(active):
    return jnp.ones((1,), jnp.int32) if active is None else active


def _launch(kernel, arrays, out_type, size, softcap, config):
    T, V = size
    return launch(
        kernel,
        arrays,
        out_type,
        grid=-(-T // config.tile_t) * -(-V // config.tile_v),
        warps=config.warps,
        stages=config.stages,
        T=T,
        V=V,
        D=arrays[0].shape[1],
        SOFTCAP=softcap,
        TILE_T=config.tile_t,
        TILE_V=config.tile_v,
        TILE_D=config.block_d,
        WALK=config.walk,
    )
