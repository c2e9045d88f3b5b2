"""The Triton backend of grouped_matmul and moe_ffn: what it takes, its sizes, its vjp.

A program makes one tile of the result: of the rows of one block, or of one expert's gradient, whose
rows it walks. Blocks that no expert uses and experts without rows are written as zeros.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain_kernels.autotune import tuned
from jaxtrain_kernels.grouped_matmul.ffn import Adapters, compose
from jaxtrain_kernels.triton_call import capability, fitting, launch, require_triton

DTYPES = (jnp.bfloat16, jnp.float16)
BLOCKS = (16, 32, 64, 128)
PRODUCT, GRADIENT = "grouped_matmul_triton", "grouped_matmul_gradient_triton"
"""Tables of tuned configs."""
WIDTH = 16  # widths are multiples of it: 16-byte loads, whole steps of a matmul


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of a kernel."""

    columns: int = 128
    """Of a tile of the result; of a gradient's, also its rows."""
    step: int = 64
    """Of what is summed over."""
    walk: int = 8
    """Tiles of rows that are walked before the next tile of columns: reuse in the L2 cache."""
    warps: int = 8
    stages: int = 3


def heuristic(block: int) -> Config:
    """By what each generation's matmuls read; nobody has timed it."""
    if capability() in (90, 100, 103):
        return Config(warps=8 if block == 128 else 4)
    return Config(step=32, warps=8 if block == 128 else 4, stages=4)


def choose(op: str, block: int, **near) -> Config:
    """The device's tuned config or the heuristic, with as many stages as shared memory holds."""
    config = tuned(op, heuristic(block), near=near, block=block)
    rows = block if op == PRODUCT else config.columns
    stage_bytes = 2 * config.step * (rows + config.columns)
    return dataclasses.replace(config, stages=fitting(config.stages, stage_bytes))


def check(x, w, segments) -> int:
    """The rows of a block; NotImplementedError with the reason unless the kernels take this."""
    require_triton()
    if x.dtype not in DTYPES:
        raise NotImplementedError(f"takes bfloat16 or float16 rows, got {x.dtype}")
    block = x.shape[0] // segments.group.shape[0]
    if block not in BLOCKS:
        raise NotImplementedError(f"takes blocks of {BLOCKS} rows, got {block}")
    if w.shape[1] % WIDTH or w.shape[2] % WIDTH:
        raise NotImplementedError(f"{w.shape[1:]} columns must be multiples of {WIDTH}")
    return block


def grouped_matmul(x, w, segments, *, freeze_w=False):
    """Implement `jaxtrain_kernels.grouped_matmul`; bfloat16 or float16, widths of multiples of
    16."""
    check(x, w, segments)
    return run(freeze_w, x, w, segments)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def run(freeze_w, x, w, segments):
    """`grouped_matmul` behind its checks."""
    return product(x, w.astype(x.dtype), segments)


def _run_fwd(freeze_w, x, w, segments):
    # In a loop XLA would run the kernel twice: for its result, and into the stack of all layers'.
    return lax.optimization_barrier(run(freeze_w, x, w, segments)), (x, w, segments)


def _run_bwd(freeze_w, residuals, dy):
    x, w, segments = residuals
    dx = product(dy, w.astype(x.dtype), segments, transpose=True)
    dw = None if freeze_w else weight_gradient(x, dy, segments, w.dtype)
    return dx, dw, None


run.defvjp(_run_fwd, _run_bwd)


def product(x, w, segments, *, transpose: bool = False, config: Config | None = None):
    """x[p] @ w[expert of p]: [P, F] of x [P, D] and w [E, D, F], or `transpose`d [E, F, D]."""
    from jaxtrain_kernels.grouped_matmul import triton_kernels

    (P, K), blocks = x.shape, segments.group.shape[0]
    N, block = w.shape[1 if transpose else 2], P // blocks
    config = config or choose(PRODUCT, block, K=K, N=N)
    return launch(
        triton_kernels.product,
        [x, w, segments.group, segments.active],
        jax.ShapeDtypeStruct((P, N), x.dtype),
        grid=blocks * -(-N // config.columns),
        warps=config.warps,
        stages=config.stages,
        BLOCKS=blocks,
        K=K,
        N=N,
        TRANSPOSED=transpose,
        BLOCK=block,
        TILE_N=config.columns,
        TILE_K=config.step,
        WALK=config.walk,
    )


def weight_gradient(x, dy, segments, dtype, *, config: Config | None = None):
    """[E, D, F] in `dtype`: x^T dy over the rows of each expert, x [P, D] and dy [P, F]."""
    from jaxtrain_kernels.grouped_matmul import triton_kernels

    (P, K), N, E = x.shape, dy.shape[1], segments.starts.shape[0]
    block = P // segments.group.shape[0]
    config = config or choose(GRADIENT, block, K=K, N=N)
    return launch(
        triton_kernels.weight_gradient,
        [x, dy, segments.starts, segments.ends],
        jax.ShapeDtypeStruct((E, K, N), dtype),
        grid=E * -(-K // config.columns) * -(-N // config.columns),
        warps=config.warps,
        stages=config.stages,
        K=K,
        N=N,
        ROWS=min(config.step, block),
        TILE_K=config.columns,
        TILE_N=config.columns,
        WALK=config.walk,
    )


def moe_ffn(x, gates, w_gate, w_up, w_down, routing, *, adapters, **options):
    """Implement `jaxtrain_kernels.moe_ffn`, with the routing of its choices: the products by
    kernels, what is between them by XLA."""
    adapters = Adapters(*(None if factors is None else _widen(*factors) for factors in adapters))
    arrays = (x, gates, w_gate, w_up, w_down, routing)
    return compose(grouped_matmul, *arrays, adapters=adapters, **options)


def _widen(a, b):
    """Factors with a rank that the kernels take: zeros behind it."""
    missing = -a.shape[2] % WIDTH
    return (jnp.pad(a, ((0, 0), (0, 0), (0, missing))), jnp.pad(b, ((0, 0), (0, missing), (0, 0))))
