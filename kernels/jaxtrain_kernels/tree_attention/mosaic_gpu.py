"""The Hopper backend of tree attention: what it takes, padding, block lists, and its vjp."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxtrain_kernels.mosaic import require_hopper
from jaxtrain_kernels.tree_attention import blocks, gpu_bwd, gpu_fwd

HEAD_DIMS = (64, 128, 256)


class Options(NamedTuple):
    """What the kernels are compiled for, beside shapes."""

    window: int | None
    softcap: float | None
    scale: float
    forward: gpu_fwd.Config
    backward: gpu_bwd.Config


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
    require_hopper()
    H = q.shape[-1]
    if H not in HEAD_DIMS:
        raise NotImplementedError(f"head dim {H} is none of {HEAD_DIMS}")
    if not q.dtype == k.dtype == v.dtype == jnp.bfloat16:
        raise NotImplementedError(f"takes bfloat16, got {q.dtype}, {k.dtype}, {v.dtype}")
    backward = gpu_bwd.heuristic(H, window is not None)
    options = Options(window, softcap, scale, gpu_fwd.heuristic(H), backward)
    return run(options, q, k, v, until, since, positions, key_positions)


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
    missing = -length % gpu_fwd.TILE
    if not missing:
        return x
    widths = [(0, 0, 0)] * x.ndim
    widths[1] = (0, missing, 0)
    return lax.pad(x, jnp.asarray(value, x.dtype), widths)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(options, q, k, v, keys, positions):
    return _forward(options, q, k, v, keys, positions)[0]


def _forward(options, q, k, v, keys, positions):
    k_block = options.forward.k_block
    tiles = blocks.lists(
        *blocks.meet(keys, positions, q.shape[1], gpu_fwd.TILE, k_block, options.window)
    )
    return gpu_fwd.forward(
        q,
        k,
        v,
        keys,
        positions,
        tiles,
        scale=options.scale,
        softcap=options.softcap,
        window=options.window,
        config=options.forward,
    )


def _attention_fwd(options, q, k, v, keys, positions):
    out, lse = _forward(options, q, k, v, keys, positions)
    # In a loop XLA would run the kernel twice: for its result, and into the stack of all layers'.
    out, lse = lax.optimization_barrier((out, lse))
    # A remat policy that saves these names spares the backward a second forward.
    out, lse = checkpoint_name(out, "attention_out"), checkpoint_name(lse, "attention_lse")
    return out, (q, k, v, keys, positions, out, lse)


def _attention_bwd(options, residuals, d_out):
    q, k, v, keys, positions, out, lse = residuals
    config, T, H = options.backward, q.shape[1], q.shape[-1]
    # Not an einsum: XLA would transpose d_out and out for it.
    delta = (d_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1).swapaxes(1, 2)
    settings = {
        "scale": options.scale,
        "softcap": options.softcap,
        "window": options.window,
        "config": config,
    }
    some, every = blocks.meet(
        keys, positions, T, config.q_block, gpu_bwd.key_tile(H), options.window
    )
    tiles = blocks.lists(some.swapaxes(1, 2), every.swapaxes(1, 2))
    arrays = (q, k, v, d_out, lse, delta, keys, positions)
    dk, dv = gpu_bwd.dkv(*arrays, tiles, **settings)
    meeting = blocks.meet(keys, positions, T, gpu_fwd.TILE, config.k_block, options.window)
    dq = gpu_bwd.dq(*arrays, blocks.lists(*meeting), **settings)
    return dq, dk, dv, None, None


_attention.defvjp(_attention_fwd, _attention_bwd)
