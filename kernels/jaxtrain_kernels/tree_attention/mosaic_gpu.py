"""The Hopper backend of tree attention: what it takes, padding, block lists, and its vjp."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxtrain_kernels.autotune import tuned
from jaxtrain_kernels.mosaic import require_hopper
from jaxtrain_kernels.tree_attention import blocks, gpu_bwd, gpu_fwd, gpu_gather, gpu_tiles

HEAD_DIMS = (64, 128, 256)


class Options(NamedTuple):
    """What the kernels are compiled for, beside shapes."""

    window: int | None
    softcap: float | None
    scale: float
    forward: gpu_fwd.Config
    dkv: gpu_bwd.DkvConfig
    dq: gpu_bwd.DqConfig
    arrange: bool = True
    """Put the keys into an order that leaves fewer blocks, where there is one."""
    fused: bool = False
    """One backward kernel, nondeterministic."""

    def settings(self) -> dict:
        return {"scale": self.scale, "softcap": self.softcap, "window": self.window}


def attention(
    q,
    k,
    v,
    until,
    *,
    since=None,
    positions=None,
    key_positions=None,
    window=None,
    softcap=None,
    scale,
):
    """See `jaxtrain_kernels.attention`; bfloat16, head dims 64, 128 and 256, one GPU per call."""
    options = _options(q, k, v, window, softcap, scale)
    return run(options, q, k, v, until, since, positions, key_positions)


def attention_fused(
    q,
    k,
    v,
    until,
    *,
    since=None,
    positions=None,
    key_positions=None,
    window=None,
    softcap=None,
    scale,
):
    """The same with one backward kernel for dQ, dK and dV, which does 5 matmuls for the 7 of two.

    Blocks add to dQ in float32 in whatever order they come: gradients differ from run to run in the
    last bits, so nothing chooses this but its name. Head dim 128.
    """
    if q.shape[-1] != gpu_bwd.FUSED_HEAD_DIM:
        raise NotImplementedError(f"head dim {q.shape[-1]} is not {gpu_bwd.FUSED_HEAD_DIM}")
    options = _options(q, k, v, window, softcap, scale)._replace(fused=True)
    return run(options, q, k, v, until, since, positions, key_positions)


def _options(q, k, v, window, softcap, scale) -> Options:
    require_hopper()
    H = q.shape[-1]
    if H not in HEAD_DIMS:
        raise NotImplementedError(f"head dim {H} is none of {HEAD_DIMS}")
    if not q.dtype == k.dtype == v.dtype == jnp.bfloat16:
        raise NotImplementedError(f"takes bfloat16, got {q.dtype}, {k.dtype}, {v.dtype}")
    windowed, near = window is not None, {"tokens": q.shape[1]}

    def config(op, heuristic):
        return tuned(f"tree_attention_{op}", heuristic, near=near, head_dim=H, window=windowed)

    forward = config("fwd", gpu_fwd.heuristic(H))
    dkv = config("dkv", gpu_bwd.dkv_heuristic(H))
    dq = config("dq", gpu_bwd.dq_heuristic(H, windowed))
    return Options(window, softcap, scale, forward, dkv, dq)


def run(options, q, k, v, until, since=None, positions=None, key_positions=None):
    """`attention` behind its checks: pads both lengths to whole tiles and calls the kernels."""
    T, S = q.shape[1], k.shape[1]
    since, until = blocks.normalise(since, until)
    keys = blocks.Keys(
        _padded(since, S, blocks.NEVER),
        _padded(until, S, 0),
        None if options.window is None else _padded(key_positions, S, 0),
    )
    positions = None if options.window is None else _padded(positions, T, 0)
    out = _attention(options, _padded(q, T), _padded(k, S), _padded(v, S), keys, positions)
    return out[:, :T]


def _padded(x, length, value=0):
    missing = -length % gpu_tiles.TILE
    if not missing:
        return x
    widths = [(0, 0, 0)] * x.ndim
    widths[1] = (0, missing, 0)
    return lax.pad(x, jnp.asarray(value, x.dtype), widths)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(options, q, k, v, keys, positions):
    return _attention_fwd(options, q, k, v, keys, positions)[0]


def _attention_fwd(options, q, k, v, keys, positions):
    config, T, arrangement = options.forward, q.shape[1], None
    if options.arrange:
        keys, arrangement = blocks.arrange(keys, positions, T, options.window)
    moved = _moved(arrangement, k, v)
    meeting = blocks.meet(keys, positions, T, gpu_tiles.TILE, config.k_block, options.window)
    tiles = blocks.lists(*meeting)
    settings = options.settings() | {"config": config}
    out, lse = gpu_fwd.forward(q, k, v, moved, keys, positions, tiles, **settings)
    # In a loop XLA would run the kernel twice: for its result, and into the stack of all layers'.
    out, lse = lax.optimization_barrier((out, lse))
    # A remat policy that saves these names spares the backward a second forward.
    out, lse = checkpoint_name(out, "attention_out"), checkpoint_name(lse, "attention_lse")
    return out, (q, k, v, keys, positions, arrangement, out, lse)


def _moved(arrangement, k, v) -> gpu_tiles.Moved | None:
    if arrangement is None:
        return None
    swapped = gpu_gather.gather(arrangement.order, arrangement.moved, k, v)
    return gpu_tiles.Moved(*swapped, arrangement.moved)


def _attention_bwd(options, residuals, d_out):
    q, k, v, keys, positions, arrangement, out, lse = residuals
    # Moving keys again costs little, keeping them from the forward would cost memory. The barrier
    # keeps XLA from finding that it is the same copy.
    arrangement, d_out = lax.optimization_barrier((arrangement, d_out))
    moved = _moved(arrangement, k, v)
    T, H = q.shape[1], q.shape[-1]
    # Not an einsum: XLA would transpose d_out and out for it.
    delta = (d_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1).swapaxes(1, 2)
    settings, q_block = options.settings(), options.dkv.q_block
    some, every = blocks.meet(keys, positions, T, q_block, gpu_bwd.key_tile(H), options.window)
    tiles = blocks.lists(some.swapaxes(1, 2), every.swapaxes(1, 2))
    arrays = (q, k, v, moved, d_out, lse, delta, keys, positions)
    if options.fused:
        dq_sum = jax.new_ref(jnp.zeros(q.shape, jnp.float32))
        dk, dv = gpu_bwd.dkv(*arrays, tiles, **settings, config=options.dkv, dq_sum=dq_sum)
        dq = (jax.freeze(dq_sum) * options.scale).astype(q.dtype)
    else:
        dk, dv = gpu_bwd.dkv(*arrays, tiles, **settings, config=options.dkv)
        k_block = options.dq.k_block
        meeting = blocks.meet(keys, positions, T, gpu_tiles.TILE, k_block, options.window)
        dq = gpu_bwd.dq(*arrays, blocks.lists(*meeting), **settings, config=options.dq)
    if arrangement is not None:
        dk, dv = gpu_gather.gather(arrangement.back, None, dk, dv)
    return dq, dk, dv, None, None


_attention.defvjp(_attention_fwd, _attention_bwd)
