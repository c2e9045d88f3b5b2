"""Which blocks of queries and keys meet: lists for the kernels, built on the device.

From O(T) numbers per row (each block's smallest and largest `since`, `until` and position) follow,
for every pair of a query block and a key block, whether any query can see any key (else the kernel
skips it) and whether every query sees every key (else it masks). Block lists of a tree are not
contiguous. Nothing here depends on q, k or v: in a stack of layers XLA builds the lists once.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

NEVER = 2**30  # `since` of a key that no query sees


class Lists(NamedTuple):
    """For each tile (row of the batch x block of one side), the blocks of the other side."""

    order: jax.Array
    """int32 [tiles] of tile ids (row * blocks + block), most work first: the hardware starts
    thread blocks in order, so the long ones do not end up alone at the end."""
    counts: jax.Array
    """int32 [tiles] number of entries in the tile's list."""
    codes: jax.Array
    """int32 [tiles, blocks of the other side]: 2 * block + (1 if it needs the mask)."""


class Keys(NamedTuple):
    """What the masks read; int32 [B, S], positions only with a window."""

    since: jax.Array
    until: jax.Array
    positions: jax.Array | None = None


def normalise(since, until) -> tuple[jax.Array, jax.Array]:
    """Intervals as the block test wants them: causal `since`, empty ones out of everyone's way."""
    if since is None:
        since = jnp.broadcast_to(jnp.arange(until.shape[1], dtype=jnp.int32)[None], until.shape)
    empty = since >= until
    return jnp.where(empty, NEVER, since), jnp.where(empty, 0, until)


def meet(keys: Keys, positions, T: int, q_block: int, k_block: int, window: int | None):
    """(any, all) bool [B, T / q_block, S / k_block]: can some query see some key, can all see all?

    `any` may be true for a pair of blocks that no visible pair falls into, never the reverse.
    """

    def low(x, block):
        return x.reshape(x.shape[0], -1, block).min(-1)

    def high(x, block):
        return x.reshape(x.shape[0], -1, block).max(-1)

    first = (jnp.arange(T // q_block, dtype=jnp.int32) * q_block)[None, :, None]
    stop = first + q_block
    some = (low(keys.since, k_block)[:, None] < stop) & (high(keys.until, k_block)[:, None] > first)
    every = (high(keys.since, k_block)[:, None] <= first) & (
        low(keys.until, k_block)[:, None] >= stop
    )
    if window is not None:
        nearest = low(positions, q_block)[:, :, None] - high(keys.positions, k_block)[:, None]
        farthest = high(positions, q_block)[:, :, None] - low(keys.positions, k_block)[:, None]
        some &= nearest < window
        every &= farthest < window
    return some, every


def lists(some, every) -> Lists:
    """Lists of the last axis' blocks for every [row, block] of the first two."""
    B, tiles, blocks = some.shape
    some, every = some.reshape(B * tiles, blocks), every.reshape(B * tiles, blocks)
    counts = some.sum(-1, dtype=jnp.int32)
    slot = jnp.where(some, jnp.cumsum(some, -1, dtype=jnp.int32) - 1, blocks)
    code = 2 * jnp.arange(blocks, dtype=jnp.int32)[None] + (~every).astype(jnp.int32)
    tile = jnp.arange(B * tiles, dtype=jnp.int32)[:, None]
    codes = (
        jnp.zeros_like(code, shape=(B * tiles, blocks))
        .at[tile, slot]
        .set(jnp.broadcast_to(code, some.shape), mode="drop", unique_indices=True)
    )
    order = jnp.argsort(-counts, stable=True).astype(jnp.int32)
    return Lists(order, counts, codes)
