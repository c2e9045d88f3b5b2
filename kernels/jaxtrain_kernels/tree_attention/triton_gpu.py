"""The Triton backend of tree attention, for NVIDIA GPUs that Mosaic declines: what it takes, block
sizes, block lists, and its vjp.

Three kernels (`triton_kernels.py`): the forward; dQ; dK and dV, whose programs go through all query
heads that share their keys. Each program adds up its own tile: deterministic.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxtrain_kernels.autotune import tuned
from jaxtrain_kernels.context import Context
from jaxtrain_kernels.tree_attention import blocks
from jaxtrain_kernels.tree_attention import sinks as sink_rule
from jaxtrain_kernels.tree_attention.gpu_tiles import Settings
from jaxtrain_kernels.triton_call import capability, launch, require_triton

DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
MOST = 256  # dims of a head
LEAST = 16  # of a matmul
TABLE = "tree_attention_triton_"  # of tuned configs: forward, dq, dkv


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of a kernel; powers of two, blocks at least 16."""

    q_block: int
    k_block: int
    warps: int = 4
    stages: int = 2
    """Blocks in flight, about."""


class Configs(NamedTuple):
    """Configs of the three kernels."""

    forward: Config
    dq: Config
    dkv: Config


class Options(NamedTuple):
    """Static parameters of the kernels, besides shapes."""

    settings: Settings
    configs: Configs
    arrange: bool = True
    """Read keys in an order that leaves fewer blocks, where there is one."""


def attention(q, k, v, context, *, window=None, softcap=None, scale, sinks=None):
    """Implement `jaxtrain_kernels.attention`; bfloat16, float16 or float32, dims up to 256, one GPU
    per call. Float32 is multiplied in three TF32 products, which keep its precision."""
    require_triton()
    if q.dtype not in DTYPES or not q.dtype == k.dtype == v.dtype:
        raise NotImplementedError(
            f"takes bfloat16, float16 or float32, got {q.dtype}, {k.dtype}, {v.dtype}"
        )
    if max(q.shape[-1], v.shape[-1]) > MOST:
        raise NotImplementedError(f"head dim {max(q.shape[-1], v.shape[-1])} is above {MOST}")
    settings = Settings(scale, softcap, window)
    configs = choose(sum(parts(q.shape[-1])), q.dtype.itemsize, window is not None, q.shape[1])
    return run(Options(settings, configs), q, k, v, context, sinks)


def parts(dim: int) -> tuple[int, int]:
    """The columns that a head dim is read in: a power of two, and a smaller one or 0. Dims that are
    no such sum are filled with zeros up to it."""
    first = max(LEAST, 1 << dim.bit_length() - 1)
    rest = max(0, dim - first)
    rest = rest and max(LEAST, 1 << (rest - 1).bit_length())
    return (2 * first, 0) if rest == first else (first, rest)


def heuristic(number: int, dim: int, itemsize: int) -> Configs:
    """By the registers and the shared memory of what compilers make of them for compute capability
    `number` / 10: large tiles that do not spill. Nobody has timed them but those of 9.0."""
    if itemsize == 4:
        least = Config(16, 16, 4, 1) if dim > 128 else Config(32, 32, 4 if dim <= 64 else 8, 1)
        return Configs(least, least, dataclasses.replace(least, warps=4 if dim > 128 else 8))
    if number == 90:  # timed on an H200: its matmuls want 4 warps for each 64 rows of a tile
        if dim <= 64:
            return Configs(Config(64, 128, 4), Config(128, 64, 4, 3), Config(128, 64, 4))
        if dim <= 128:
            return Configs(Config(128, 128, 8, 3), Config(128, 128, 8, 3), Config(64, 64, 4))
        return Configs(Config(128, 64, 8, 3), Config(128, 32, 8, 3), Config(64, 64, 8))
    if number in (100, 103):  # matmuls that read shared memory
        if dim <= 64:
            return Configs(Config(128, 128, 8, 3), Config(128, 64, 8), Config(64, 128, 8))
        if dim <= 128:
            return Configs(Config(128, 128, 8), Config(128, 64, 8), Config(64, 128, 8))
        return Configs(Config(128, 64, 8), Config(64, 32, 8), Config(32, 32, 8))
    if dim <= 64:
        return Configs(Config(128, 64, 4, 3), Config(128, 64, 8), Config(64, 128, 8))
    if dim <= 128:
        return Configs(Config(128, 64, 8, 3), Config(64, 64, 4), Config(64, 64, 8))
    return Configs(Config(64, 32, 4), Config(32, 32, 4), Config(32, 32, 8))


def choose(dim: int, itemsize: int, windowed: bool, tokens: int) -> Configs:
    """The device's tuned configs, else the heuristic's."""
    key, near = key_of(dim, itemsize, windowed), {"tokens": tokens}
    configs = heuristic(capability(), dim, itemsize)._asdict()
    return Configs(*(tuned(TABLE + op, config, near=near, **key) for op, config in configs.items()))


def key_of(dim: int, itemsize: int, windowed: bool) -> dict:
    """Key of a table's entry."""
    return {"head_dim": dim, "itemsize": itemsize, "window": windowed}


def run(options: Options, q, k, v, context, sinks=None):
    """`attention` behind its checks: fills up head dims and calls the kernels."""
    V = v.shape[-1]
    context, order = find_order(options, context, q.shape[1], k.shape[1])
    q, k = (_filled(x, sum(parts(x.shape[-1]))) for x in (q, k))
    v = _filled(v, max(LEAST, 1 << (V - 1).bit_length()))
    return _attention(options, q, k, v, context, order, sinks)[..., :V]


def find_order(options: Options, context: Context, T: int, S: int):
    """The context, its keys in the order in which blocks take them, and that order int32 [B, S],
    None for the row's own."""
    # No row behind the last: what is wholly visible is then whole in the arrays, too.
    context = context._replace(until=jnp.minimum(context.until, T))
    context, order = blocks.prepare(context, blocks.ARRANGED, blocks.ARRANGED), None
    if options.arrange:
        padded_length = T + -T % blocks.ARRANGED
        context, arrangement = blocks.arrange(context, padded_length, options.settings.window)
        order = arrangement.order[:, :S]
    lengths = Context(S, S, T, S)
    cut = (None if x is None else x[:, :n] for x, n in zip(context, lengths, strict=True))
    return Context(*cut), order


def _filled(x, dim: int):
    return jnp.pad(x, ((0, 0),) * 3 + ((0, dim - x.shape[-1]),)) if dim > x.shape[-1] else x


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(options, q, k, v, context, order, sinks):
    return _attention_fwd(options, q, k, v, context, order, sinks)[0]


def _attention_fwd(options, q, k, v, context, order, sinks):
    B, T, N, _ = q.shape
    shapes = (
        jax.ShapeDtypeStruct((B, T, N, v.shape[-1]), q.dtype),
        jax.ShapeDtypeStruct((B, N, T), jnp.float32),
    )
    config = options.configs.forward
    outputs = launch_kernel("forward", config, options, (q, k, v), shapes, context, order)
    # In a loop XLA would run the kernel twice: for its result, and into the stack of all layers'.
    out, lse = lax.optimization_barrier(outputs)
    if sinks is not None:
        out, lse = sink_rule.absorb_into(out, lse, sinks)
    # A remat policy that saves these names spares the backward a second forward.
    out, lse = checkpoint_name(out, "attention_out"), checkpoint_name(lse, "attention_lse")
    return out, (q, k, v, context, order, sinks, out, lse)


def _attention_bwd(options, residuals, d_out):
    q, k, v, context, order, sinks, out, lse = residuals
    delta = (d_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1).swapaxes(1, 2)
    inputs = (q, k, v, d_out, lse, delta)
    out_types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v)]
    configs = options.configs
    (dq,) = launch_kernel(
        "queries_gradient", configs.dq, options, inputs, out_types[:1], context, order
    )
    dk, dv = launch_kernel(
        "keys_gradient", configs.dkv, options, inputs, out_types[1:], context, order
    )
    d_sinks = None if sinks is None else sink_rule.total_gradient(sinks, lse, delta)
    return dq, dk, dv, None, None, d_sinks


_attention.defvjp(_attention_fwd, _attention_bwd)


def launch_kernel(
    name, config: Config, options: Options, inputs, out_shapes, context: Context, order
):
    """Launch one of the three kernels: build its block lists and static parameters. `context` and
    `order` as `find_order` has them."""
    from jaxtrain_kernels.tree_attention import triton_kernels

    q, k, v, *_ = inputs
    B, T, N, H = q.shape
    S, K = k.shape[1:3]
    settings, by_key = options.settings, name == "keys_gradient"
    context = blocks.prepare(context, config.q_block, config.k_block)
    order = context.until if order is None else blocks.padded(order, config.k_block)
    any_visible, every = blocks.meet(
        context, T + -T % config.q_block, config.q_block, config.k_block, settings.window
    )
    if by_key:
        any_visible, every = any_visible.swapaxes(1, 2), every.swapaxes(1, 2)
    full_lists, part = (
        blocks.lists(any_visible & every, every),
        blocks.lists(any_visible & ~every, every),
    )
    longest = jnp.argsort(-(full_lists.counts + part.counts), stable=True).astype(jnp.int32)
    positions = [context.until if x is None else x for x in context[2:4]]
    arrays = (*inputs, context.since, context.until, *positions, order, longest)
    arrays += (full_lists.counts, full_lists.codes, part.counts, part.codes)
    dim, rest = parts(H)
    constants = {"SCALE": settings.scale} if name != "forward" else {}
    return launch(
        getattr(triton_kernels, name),
        arrays,
        list(out_shapes),
        grid=longest.size * (K if by_key else N),
        warps=config.warps,
        stages=config.stages,
        T=T,
        S=S,
        HEADS=N,
        KEY_HEADS=K,
        DIM=dim,
        REST=rest,
        VALUE=v.shape[-1],
        Q_BLOCK=config.q_block,
        K_BLOCK=config.k_block,
        CAP=settings.scale / settings.softcap if settings.softcap else 0.0,
        LOGIT=settings.logit_scale,
        WINDOW=settings.window or 0,
        ORDERED=options.arrange,
        PRECISION="tf32x3" if q.dtype == jnp.float32 else "tf32",
        **constants,
    )
