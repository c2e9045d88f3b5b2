"""What the Hopper kernels of tree attention share: going through query tiles, a ring of key blocks.

A thread block has `WARPGROUPS` compute warpgroups of `ROWS` queries each, and one that only moves
memory: it walks the tile's list of key blocks, fills a ring of K and V buffers by TMA, and runs
ahead into the thread block's next tile.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxtrain_kernels.mosaic import num_cores, plgpu, swizzled
from jaxtrain_kernels.tree_attention import blocks

LOG2E = math.log2(math.e)
WARPGROUPS = 2
ROWS = 64  # queries of a warpgroup
TILE = WARPGROUPS * ROWS


def num_programs(programs: int, tiles: int) -> int:
    """Thread blocks for that many tiles, as a config wants them."""
    return tiles if programs < 0 else min(programs or num_cores(), tiles)


class Place(NamedTuple):
    """Where a tile's queries are."""

    row: jax.Array
    first: jax.Array
    head: jax.Array


class Turn(NamedTuple):
    """One tile of a thread block."""

    turn: jax.Array
    tile: jax.Array
    place: Place
    following: Place
    """Of the next turn, where there is `more`."""
    more: jax.Array
    count: jax.Array
    """Steps: blocks in its list."""
    code: jax.Array
    """The first of them."""
    before: jax.Array
    """Steps of the turns before."""


class Schedule(NamedTuple):
    """How one thread block goes through its query tiles: longest first, back and forth over the
    thread blocks, which balances a sorted list to within a short tile."""

    program: jax.Array
    programs: int
    rows: int
    tiles: int
    """Of a row."""
    heads: int
    order: jax.Array
    counts: jax.Array
    codes: jax.Array

    def rounds(self):
        whole, rest = divmod(self.rows * self.tiles * self.heads, self.programs)
        return whole + (self._lane(jnp.int32(whole)) < rest).astype(jnp.int32)

    def go_through(self, work):
        """work(Turn) for every tile; the number of steps. What follows is read ahead, to hide the
        latency of the loads."""

        def body(turn, carry):
            before, tile, count, code, next_tile = carry
            following = self.counts[next_tile], self.codes[next_tile, 0]
            after = self._tile(turn + 2)
            place, next_place = self._place(turn, tile), self._place(turn + 1, next_tile)
            more = turn + 1 < self.rounds()
            work(Turn(turn, tile, place, next_place, more, count, code, before))
            return before + count, next_tile, *following, after

        first = self._tile(jnp.int32(0))
        start = (jnp.int32(0), first, self.counts[first], self.codes[first, 0])
        return lax.fori_loop(0, self.rounds(), body, (*start, self._tile(jnp.int32(1))))[0]

    def first_place(self):
        return self._place(jnp.int32(0), self._tile(jnp.int32(0)))

    def _place(self, turn, tile):
        row, part = lax.div(tile, jnp.int32(self.tiles)), lax.rem(tile, jnp.int32(self.tiles))
        return Place(row, part * TILE, lax.rem(self._item(turn), jnp.int32(self.heads)))

    def _item(self, turn):
        """In the longest-first order; the last one for turns past the end."""
        last = self.rows * self.tiles * self.heads - 1
        return lax.min(turn * self.programs + self._lane(turn), jnp.int32(last))

    def _tile(self, turn):
        return self.order[lax.div(self._item(turn), jnp.int32(self.heads))]

    def _lane(self, turn):
        back = jnp.int32(self.programs - 1) - self.program
        return lax.select(lax.rem(turn, jnp.int32(2)) == 0, self.program, back)


class Moved(NamedTuple):
    """K and V in the blocks' order [B, S, K, H], and the rows [B] int32 that want them: in the
    others (0) the originals are in that order already."""

    k: jax.Array
    v: jax.Array
    rows: jax.Array


def copy_block(moved, original, other, place, target, ready):
    """TMA of `place` from the array that is in the blocks' order; `moved` None: the original."""
    if moved is None:
        plgpu.copy_gmem_to_smem(original.at[place], target, ready)
        return

    @pl.when(moved > 0)
    def _():
        plgpu.copy_gmem_to_smem(other.at[place], target, ready)

    @pl.when(moved == 0)
    def _():
        plgpu.copy_gmem_to_smem(original.at[place], target, ready)


class Keys(NamedTuple):
    """References to keys in device memory, what is known of each, and their lists."""

    k: jax.Ref
    v: jax.Ref
    since: jax.Ref
    until: jax.Ref
    codes: jax.Ref
    positions: jax.Ref | None = None
    k_moved: jax.Ref | None = None
    v_moved: jax.Ref | None = None
    moved: jax.Ref | None = None


def key_arrays(k, v, keys: blocks.Keys, positions, tiles: blocks.Lists, moved: Moved | None):
    """Everything about the keys that a kernel takes, in the order that `key_refs` wants."""
    window_arrays = [] if keys.positions is None else [positions, keys.positions]
    moved_arrays = [] if moved is None else list(moved)
    return [k, v, keys.since, keys.until, *tiles, *window_arrays, *moved_arrays]


def key_refs(refs, window: int | None, moved: Moved | None):
    """(positions of the queries, `Keys`, order, counts, the refs that are left)."""
    k, v, since, until, order, counts, codes, *refs = refs
    position = key_position = None
    if window is not None:
        position, key_position, *refs = refs
    copies = [None] * 3
    if moved is not None:
        copies, refs = refs[:3], refs[3:]
    return position, Keys(k, v, since, until, codes, key_position, *copies), order, counts, refs


class Ring(NamedTuple):
    """Buffers of key blocks; K and V have their own numbers of stages."""

    k: jax.Ref
    v: jax.Ref
    since: jax.Ref
    until: jax.Ref
    k_ready: jax.Ref
    k_free: jax.Ref
    v_ready: jax.Ref
    v_free: jax.Ref
    positions: jax.Ref | None = None


class Shape(NamedTuple):
    """Keys of a block, buffers of K and of V."""

    block: int
    k_stages: int
    v_stages: int

    def k_slot(self, step):
        return lax.rem(step, jnp.int32(self.k_stages))

    def v_slot(self, step):
        return lax.rem(step, jnp.int32(self.v_stages))

    def scratch(self, head_dim: int, dtype, window: bool) -> list:
        """What `Ring` refers to, in its order."""
        per_key = plgpu.SMEM((self.k_stages, self.block), jnp.int32)
        free = {"num_arrivals": WARPGROUPS}
        return [
            swizzled((self.k_stages, self.block, head_dim), dtype),
            swizzled((self.v_stages, self.block, head_dim), dtype),
            per_key,
            per_key,
            plgpu.Barrier(num_barriers=self.k_stages, num_arrivals=4 if window else 3),
            plgpu.Barrier(num_barriers=self.k_stages, **free),
            plgpu.Barrier(num_barriers=self.v_stages),
            plgpu.Barrier(num_barriers=self.v_stages, **free),
            *([per_key] if window else []),
        ]


def feed(now: Turn, keys: Keys, ring: Ring, shape: Shape, kv_head) -> None:
    """The memory warpgroup's part of a tile: its key blocks into the ring.

    Queries are no part of it: it must wait for nothing but free buffers of the ring, else it could
    keep from one compute warpgroup what the other waits for that one to do.
    """
    moved = None if keys.moved is None else keys.moved[now.place.row]

    def step(i, code):
        next_code = keys.codes[now.tile, lax.min(i + 1, now.count - 1)]
        k_slot, v_slot = shape.k_slot(now.before + i), shape.v_slot(now.before + i)
        block = lax.shift_right_logical(code, 1)
        part = pl.ds(pl.multiple_of(block * shape.block, shape.block), shape.block)

        @pl.when(now.before + i >= shape.k_stages)
        def _():
            plgpu.barrier_wait(ring.k_free.at[k_slot])

        ready, place = ring.k_ready.at[k_slot], (now.place.row, part, kv_head)
        copy_block(moved, keys.k, keys.k_moved, place, ring.k.at[k_slot], ready)
        for source, target in (
            (keys.since, ring.since),
            (keys.until, ring.until),
            (keys.positions, ring.positions),
        ):
            if source is not None:
                plgpu.copy_gmem_to_smem(source.at[now.place.row, part], target.at[k_slot], ready)

        @pl.when(now.before + i >= shape.v_stages)
        def _():
            plgpu.barrier_wait(ring.v_free.at[v_slot])

        ready = ring.v_ready.at[v_slot]
        copy_block(moved, keys.v, keys.v_moved, place, ring.v.at[v_slot], ready)
        return next_code

    lax.fori_loop(0, now.count, step, now.code)


def drain(steps, ring: Ring, shape: Shape) -> None:
    """Leave no barrier phase of the ring unobserved."""

    @pl.loop(lax.max(steps - shape.k_stages, 0), steps)
    def _(i):
        plgpu.barrier_wait(ring.k_free.at[shape.k_slot(i)])

    @pl.loop(lax.max(steps - shape.v_stages, 0), steps)
    def _(i):
        plgpu.barrier_wait(ring.v_free.at[shape.v_slot(i)])


def seen_in(ring: Ring, slot, first, position, block: int, window: int | None):
    """bool [ROWS, block]: which keys of a ring's buffer the queries from `first` on see."""
    wgmma = plgpu.Layout.WGMMA

    def column(ref):
        values = plgpu.load(ref.at[slot], layout=wgmma.reduce(0))
        return lax.broadcast_in_dim(values, (ROWS, block), [1])

    q_index = plgpu.broadcasted_iota(jnp.int32, (ROWS, block), 0, layout=wgmma) + first
    seen = (q_index >= column(ring.since)) & (q_index < column(ring.until))
    if window is not None:
        own = lax.broadcast_in_dim(position, (ROWS, block), [0])
        seen &= own - column(ring.positions) < window
    # TMA overwrites what was just read into registers: order the two.
    plgpu.commit_smem()
    return seen
