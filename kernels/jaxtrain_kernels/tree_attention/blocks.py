"""Which blocks of queries and keys meet: lists for the kernels, built on the device.

From O(T) numbers per row (each block's smallest and largest `since`, `until` and position) follow,
for every pair of a query block and a key block, whether any query can see any key (else the kernel
skips it) and whether every query sees every key (else it masks). Block lists of a tree are not
contiguous. Nothing here depends on q, k or v: in a stack of layers XLA builds the lists once.

Keys may stand in any order, and the row's own is a bad one for trees with short branches: a branch
of 70 keys spoils a block of 128 for every later query. `arrange` puts keys that stay visible for
long together.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain_kernels.context import Context

NEVER = 2**30  # `since` of a key that no query sees: more than any row has, far from overflow


class Lists(NamedTuple):
    """For each tile (row of the batch x block of one side), the blocks of the other side."""

    order: jax.Array
    """int32 [tiles] of tile ids (row * blocks + block), most work first: the hardware starts
    thread blocks in order, so the long ones do not end up alone at the end."""
    counts: jax.Array
    """int32 [tiles] number of entries in the tile's list."""
    codes: jax.Array
    """int32 [tiles, blocks of the other side]: 2 * block + (1 if it needs the mask)."""


class Arrangement(NamedTuple):
    """An order of each row's keys."""

    order: jax.Array
    """int32 [B, S]: the key at every place."""
    back: jax.Array
    """int32 [B, S]: the place of every key."""
    moved: jax.Array
    """int32 [B]: 0 where the order is the row's own."""


ARRANGED = 128  # queries and keys of the blocks that `arrange` counts
WORTH = 0.96  # share of the blocks that must be left at most: moving keys costs time as well


def normalize(context: Context) -> Context:
    """Intervals as the block test wants them: causal `since`, empty ones out of everyone's way."""
    since, until = context.since, context.until
    if since is None:
        since = jnp.broadcast_to(jnp.arange(until.shape[1], dtype=jnp.int32)[None], until.shape)
    empty = since >= until
    # Else an empty interval would widen its block's range of `since` and `until`, and the block
    # would be visited for nothing.
    since, until = jnp.where(empty, NEVER, since), jnp.where(empty, 0, until)
    return context._replace(since=since, until=until)


def padded(x: jax.Array, block: int, value=0) -> jax.Array:
    """Axis 1 of [B, length, ...] filled up to whole blocks."""
    missing = -x.shape[1] % block
    if not missing:
        return x
    widths = [(0, 0, 0)] * x.ndim
    widths[1] = (0, missing, 0)
    return lax.pad(x, jnp.asarray(value, x.dtype), widths)


def prepare(context: Context, q_block: int, k_block: int) -> Context:
    """`normalize`d, of whole blocks; keys of the padding are seen by nobody."""
    context = normalize(context)
    sides = ((context.positions, q_block), (context.key_positions, k_block))
    return Context(
        padded(context.until, k_block),
        padded(context.since, k_block, NEVER),
        *(None if x is None else padded(x, block) for x, block in sides),
    )


def meet(context: Context, T: int, q_block: int, k_block: int, window: int | None):
    """(any, all) bool [B, T / q_block, S / k_block]: can some query see some key, can all see all?

    `any` may be true for a pair of blocks that no visible pair falls into, never the reverse.
    """

    def low(x, block):
        return x.reshape(x.shape[0], -1, block).min(-1)

    def high(x, block):
        return x.reshape(x.shape[0], -1, block).max(-1)

    first = (jnp.arange(T // q_block, dtype=jnp.int32) * q_block)[None, :, None]
    stop = first + q_block
    since, until = context.since, context.until
    any_visible = (low(since, k_block)[:, None] < stop) & (high(until, k_block)[:, None] > first)
    every = (high(since, k_block)[:, None] <= first) & (low(until, k_block)[:, None] >= stop)
    if window is not None:
        positions, keys = context.positions, context.key_positions
        nearest = low(positions, q_block)[:, :, None] - high(keys, k_block)[:, None]
        farthest = high(positions, q_block)[:, :, None] - low(keys, k_block)[:, None]
        any_visible &= nearest < window
        every &= farthest < window
    return any_visible, every


def arrange(context: Context, T: int, window: int | None) -> tuple[Context, Arrangement]:
    """The keys in the order that leaves fewer blocks to visit, row by row: their own, or sorted by
    `until`, the last to be seen first, which in a tree takes the branches out of the trunk."""
    until = context.until
    row_order = jnp.broadcast_to(jnp.arange(until.shape[1], dtype=jnp.int32)[None], until.shape)
    _, order = lax.sort((-until, row_order), dimension=1, is_stable=True, num_keys=1)

    def sorted_by(order):
        names = ("since", "until", "key_positions")
        of_keys = {n: x for n in names if (x := getattr(context, n)) is not None}
        taken = {n: jnp.take_along_axis(x, order, 1) for n, x in of_keys.items()}
        return context._replace(**taken)

    def visits(context):
        any_visible, _ = meet(context, T, ARRANGED, ARRANGED, window)
        return any_visible.sum((1, 2)).astype(jnp.float32)

    moved = visits(sorted_by(order)) < WORTH * visits(context)
    order = jnp.where(moved[:, None], order, row_order)
    rows = jnp.arange(len(row_order), dtype=jnp.int32)[:, None]
    back = jnp.zeros_like(order).at[rows, order].set(row_order, unique_indices=True)
    return sorted_by(order), Arrangement(order, back, moved.astype(jnp.int32))


def lists(any_visible, every) -> Lists:
    """Lists of the last axis' blocks for every [row, block] of the first two."""
    B, tiles, blocks = any_visible.shape
    any_visible, every = any_visible.reshape(B * tiles, blocks), every.reshape(B * tiles, blocks)
    counts = any_visible.sum(-1, dtype=jnp.int32)
    slot = jnp.where(any_visible, jnp.cumsum(any_visible, -1, dtype=jnp.int32) - 1, blocks)
    code = 2 * jnp.arange(blocks, dtype=jnp.int32)[None] + (~every).astype(jnp.int32)
    tile = jnp.arange(B * tiles, dtype=jnp.int32)[:, None]
    codes = (
        jnp.zeros_like(code, shape=(B * tiles, blocks))
        .at[tile, slot]
        .set(jnp.broadcast_to(code, any_visible.shape), mode="drop", unique_indices=True)
    )
    # Stable, so that the order, and with it the timing, is the same in every run.
    order = jnp.argsort(-counts, stable=True).astype(jnp.int32)
    return Lists(order, counts, codes)
