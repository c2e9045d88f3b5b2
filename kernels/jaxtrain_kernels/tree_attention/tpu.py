"""The TPU backend of tree attention: what it takes, padding, lists of blocks, and its vjp."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxtrain_kernels.mosaic import device_kind, require_local
from jaxtrain_kernels.tree_attention import blocks, tpu_kernels
from jaxtrain_kernels.tree_attention import sinks as sink_rule
from jaxtrain_kernels.tree_attention.tpu_kernels import FIRST, FLAG_BITS, LANES, LAST, MASKED, MEETS

MAX_ENTRIES = 2**16  # pairs of blocks: two int32 each, in 1 MiB of scalar memory


class Options(NamedTuple):
    """Static parameters of the kernels, besides shapes."""

    window: int | None
    softcap: float | None
    scale: float
    q_block: int
    k_block: int


def attention(q, k, v, context, *, window=None, softcap=None, scale, sinks=None):
    """Implement `jaxtrain_kernels.attention`; bfloat16, head dims up to 256, one TPU per call."""
    kind = device_kind()
    if "TPU" not in kind:
        raise NotImplementedError(f"needs a TPU, the device is {kind!r}")
    require_local()
    B, T, _, H = q.shape
    S = k.shape[1]
    if v.shape != k.shape:
        raise NotImplementedError(f"values of {v.shape[-1]} dims beside keys of {k.shape[-1]}")
    if H > 256:
        raise NotImplementedError(f"head dim {H} is above 256")
    if not q.dtype == k.dtype == v.dtype == jnp.bfloat16:
        raise NotImplementedError(f"takes bfloat16, got {q.dtype}, {k.dtype}, {v.dtype}")
    options = Options(window, softcap, scale, choose_block(T), choose_block(S))
    entries = B * -(-T // options.q_block) * -(-S // options.k_block)
    if entries > MAX_ENTRIES:
        raise NotImplementedError(f"{entries} pairs of blocks, more than {MAX_ENTRIES}")
    return run(options, q, k, v, context, sinks)


def choose_block(length: int) -> int:
    """Tokens of a block: large ones for long rows, where padding to whole blocks is small."""
    return 512 if length >= 2048 else 256 if length >= 512 else 128


def run(options, q, k, v, context, sinks=None):
    """`attention` behind its checks: head-major arrays of whole blocks and lanes."""
    B, T, N, H = q.shape

    def head_major(x, block):
        x = blocks.padded(x, block)
        x = lax.pad(x, jnp.zeros((), x.dtype), ((0, 0, 0),) * 3 + ((0, -H % LANES, 0),))
        return x.transpose(2, 0, 1, 3).reshape(x.shape[2], -1, x.shape[3])

    out = _attention(
        options,
        head_major(q, options.q_block),
        head_major(k, options.k_block),
        head_major(v, options.k_block),
        blocks.prepare(context, options.q_block, options.k_block),
        sinks,
    )
    return out.reshape(N, B, -1, out.shape[-1]).transpose(1, 2, 0, 3)[:, :T, :, :H]


def list_pairs(any_visible: jax.Array, every: jax.Array) -> tpu_kernels.Pairs:
    """Entries of [B, tiles, blocks] (see blocks.meet) by tile; a tile that meets nobody has one."""
    B, tiles, other_blocks = any_visible.shape
    lonely = ~any_visible.any(-1, keepdims=True)
    block = jnp.arange(other_blocks, dtype=jnp.int32)[None, None]
    # A tile that meets no block gets one entry, else its result would never be written.
    listed = any_visible | (lonely & (block == 0))
    before = jnp.cumsum(listed, -1, dtype=jnp.int32)
    first = before == 1
    last = before == listed.sum(-1, dtype=jnp.int32, keepdims=True)
    flags = FIRST * first + LAST * last + MEETS * any_visible + MASKED * ~every
    row = jnp.arange(B, dtype=jnp.int32)[:, None, None]
    codes = ((row * other_blocks + block) << FLAG_BITS) + flags.astype(jnp.int32)
    tile = row * tiles + jnp.arange(tiles, dtype=jnp.int32)[None, :, None]
    (pair_index,) = jnp.nonzero(listed.reshape(-1), size=listed.size, fill_value=0)
    return tpu_kernels.Pairs(
        listed.sum(dtype=jnp.int32),
        jnp.broadcast_to(tile, listed.shape).reshape(-1)[pair_index],
        codes.reshape(-1)[pair_index],
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(options, q, k, v, context, sinks):
    return _forward(options, q, k, v, context, sinks)[0]


def _meeting(options, context, length):
    """Which blocks meet, and what the kernels read of the masks, rows end to end."""
    T = length // context.until.shape[0]
    any_visible, every = blocks.meet(context, T, options.q_block, options.k_block, options.window)
    settings = tpu_kernels.BlockSettings(
        options.q_block,
        options.k_block,
        T // options.q_block,
        options.scale,
        options.softcap,
        options.window,
    )
    flat = jax.tree.map(lambda x: x.reshape(1, -1), context)
    return any_visible, every, flat, settings


def _forward(options, q, k, v, context, sinks):
    any_visible, every, flat, settings = _meeting(options, context, q.shape[1])
    out, lse = tpu_kernels.forward(q, k, v, flat, list_pairs(any_visible, every), settings)
    if sinks is not None:
        lse, share = sink_rule.absorb(lse, _by_head(sinks))
        # The kernel knows no sinks: its softmax is rescaled by the share that the sink leaves.
        out = (out.astype(jnp.float32) * share[:, 0, :, None]).astype(out.dtype)
    return out, lse


def _attention_fwd(options, q, k, v, context, sinks):
    out, lse = _forward(options, q, k, v, context, sinks)
    # A remat policy that saves these names spares the backward a second forward.
    out, lse = checkpoint_name(out, "attention_out"), checkpoint_name(lse, "attention_lse")
    return out, (q, k, v, context, sinks, out, lse)


def _attention_bwd(options, residuals, d_out):
    q, k, v, context, sinks, out, lse = residuals
    delta = (d_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1)
    any_visible, every, flat, settings = _meeting(options, context, q.shape[1])
    arrays = (q, k, v, d_out, lse, delta[:, None], flat)
    dq = tpu_kernels.dq(*arrays, list_pairs(any_visible, every), settings)
    pairs = list_pairs(any_visible.swapaxes(1, 2), every.swapaxes(1, 2))
    dk, dv = tpu_kernels.dkv(*arrays, pairs, settings)
    d_sinks = None
    if sinks is not None:
        sink_grads = sink_rule.gradient(_by_head(sinks), lse, delta[:, None])
        d_sinks = sink_grads.sum((1, 2)).astype(sinks.dtype)
    return dq, dk, dv, None, d_sinks


def _by_head(sinks):
    """[N] -> [N, 1, 1]."""
    return sinks.astype(jnp.float32)[:, None, None]


_attention.defvjp(_attention_fwd, _attention_bwd)
