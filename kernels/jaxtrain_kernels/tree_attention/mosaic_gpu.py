"""The Hopper backend of tree attention: what it takes, padding, block lists, and its vjp."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxtrain_kernels.autotune import tuned
from jaxtrain_kernels.mosaic import require_hopper
from jaxtrain_kernels.tree_attention import (
    blocks,
    gpu_dkv,
    gpu_dq,
    gpu_fused,
    gpu_fwd,
    gpu_gather,
    gpu_tiles,
    gpu_wide,
)
from jaxtrain_kernels.tree_attention import sinks as sink_rule

WIDTHS = ((64, 64), (128, 128), (192, 128), (256, 256), (512, 512))  # of keys and of values


class Options(NamedTuple):
    """Static parameters of the kernels, besides shapes."""

    settings: gpu_tiles.Settings
    forward: gpu_fwd.Config
    dkv: gpu_dkv.Config | None
    """None, as `dq`: gpu_wide.py has the backward."""
    dq: gpu_dq.Config | None
    arrange: bool = True
    """Put the keys into an order that leaves fewer blocks, where there is one."""
    fused: gpu_fused.Config | None = None
    """One backward kernel (gpu_fused.py) in place of two, those of `dkv` and `dq`."""


def attention(q, k, v, context, *, window=None, softcap=None, scale, sinks=None):
    """Implement `jaxtrain_kernels.attention`; bfloat16, dims up to 512, one GPU per call.

    Heads of other dims than `WIDTHS` are filled with zeros.
    """
    settings, V = gpu_tiles.Settings(scale, softcap, window), v.shape[-1]
    q, k, v = _filled(q, k, v)
    return run(_options(q, k, v, settings), q, k, v, context, sinks)[..., :V]


def _filled(q, k, v):
    """With zeros behind every head up to the next dims that the kernels have: scores stay as they
    are, and so does what comes out of the values' own columns."""
    H, V = q.shape[-1], v.shape[-1]
    widths = min((w for w in WIDTHS if w[0] >= H and w[1] >= V), default=None)
    if widths is None:
        raise NotImplementedError(f"head dim {max(H, V)} is above {max(max(WIDTHS))}")
    padded_widths = widths[0], widths[0], widths[1]
    return [
        jnp.pad(x, ((0, 0),) * 3 + ((0, dim - x.shape[-1]),))
        for x, dim in zip((q, k, v), padded_widths, strict=True)
    ]


def _options(q, k, v, settings: gpu_tiles.Settings) -> Options:
    require_hopper()
    H = q.shape[-1]
    if not q.dtype == k.dtype == v.dtype == jnp.bfloat16:
        raise NotImplementedError(f"takes bfloat16, got {q.dtype}, {k.dtype}, {v.dtype}")
    windowed, near = settings.window is not None, {"tokens": q.shape[1]}

    def config(op, heuristic):
        return tuned(f"tree_attention_{op}", heuristic, near=near, head_dim=H, window=windowed)

    forward = config("fwd", gpu_fwd.heuristic(H))
    if gpu_wide.takes(H):
        return Options(settings, forward, None, None)
    dkv = config("dkv", gpu_dkv.heuristic(H))
    dq = config("dq", gpu_dq.heuristic(H, windowed))
    fused = None
    if gpu_fused.takes(H, settings.window):
        fused = config("fused", gpu_fused.heuristic(H))
    return Options(settings, forward, dkv, dq, fused=fused)


def run(options, q, k, v, context, sinks=None):
    """`attention` behind its checks: pads both lengths to whole tiles and calls the kernels."""
    q_padded, k, v = (blocks.padded(x, gpu_tiles.TILE) for x in (q, k, v))
    context = blocks.prepare(context, gpu_tiles.TILE, gpu_tiles.TILE)
    return _attention(options, q_padded, k, v, context, sinks)[:, : q.shape[1]]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(options, q, k, v, context, sinks):
    return _attention_fwd(options, q, k, v, context, sinks)[0]


def _attention_fwd(options, q, k, v, context, sinks):
    config, T, arrangement = options.forward, q.shape[1], None
    window = options.settings.window
    if options.arrange:
        context, arrangement = blocks.arrange(context, T, window)
    moved = _moved(arrangement, k, v)
    lists = blocks.lists(*blocks.meet(context, T, gpu_tiles.TILE, config.k_block, window))
    keys = gpu_tiles.describe_keys(k, v, context, lists, moved)
    out, lse = gpu_fwd.forward(q, keys, options.settings, config)
    # In a loop XLA would run the kernel twice: for its result, and into the stack of all layers'.
    out, lse = lax.optimization_barrier((out, lse))
    if sinks is not None:
        out, lse = sink_rule.absorb_into(out, lse, sinks)
    # A remat policy that saves these names spares the backward a second forward.
    out, lse = checkpoint_name(out, "attention_out"), checkpoint_name(lse, "attention_lse")
    return out, (q, k, v, context, sinks, arrangement, out, lse)


def _moved(arrangement, k, v) -> gpu_tiles.Moved | None:
    if arrangement is None:
        return None
    swapped = gpu_gather.gather(arrangement.order, arrangement.moved, k, v)
    return gpu_tiles.Moved(*swapped, arrangement.moved)


def _attention_bwd(options, residuals, d_out):
    q, k, v, context, sinks, arrangement, out, lse = residuals
    # Moving keys again costs little, keeping them from the forward would cost memory. The barrier
    # keeps XLA from finding that it is the same copy.
    arrangement, d_out = lax.optimization_barrier((arrangement, d_out))
    T, H = q.shape[1], q.shape[-1]
    # Not an einsum: XLA would transpose d_out and out for it.
    delta = (d_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1).swapaxes(1, 2)
    settings, window = options.settings, options.settings.window
    moved = _moved(arrangement, k, v)
    queries = gpu_tiles.Queries(q, d_out, lse, delta)

    def listed(q_block, k_block, of_keys):
        """The keys, with the blocks that each tile of keys, or of queries, visits."""
        pair = blocks.meet(context, T, q_block, k_block, window)
        lists = blocks.lists(*(x.swapaxes(1, 2) if of_keys else x for x in pair))
        return gpu_tiles.describe_keys(k, v, context, lists, moved)

    if options.dkv is None:
        keys = listed(gpu_wide.BLOCK, gpu_tiles.ROWS, True)
        dk, dv = gpu_wide.dk(queries, keys, settings), gpu_wide.dv(queries, keys, settings)
        keys = listed(gpu_tiles.ROWS, gpu_wide.BLOCK, False)
        dq = gpu_wide.dq(queries, keys, settings)
    elif options.fused:
        keys = listed(options.fused.q_block, gpu_dkv.key_tile(H), True)
        dq, dk, dv = gpu_fused.backward(queries, keys, settings, options.fused)
    else:
        keys = listed(options.dkv.q_block, gpu_dkv.key_tile(H), True)
        dk, dv = gpu_dkv.dkv(queries, keys, settings, options.dkv)
        keys = listed(gpu_tiles.TILE, options.dq.k_block, False)
        dq = gpu_dq.dq(queries, keys, settings, options.dq)
    if arrangement is not None:
        dk, dv = gpu_gather.gather(arrangement.back, None, dk, dv)
    d_sinks = None if sinks is None else sink_rule.total_gradient(sinks, lse, delta)
    return dq, dk, dv, None, d_sinks


_attention.defvjp(_attention_fwd, _attention_bwd)
