"""Shared by the Hopper kernels of tree attention: the schedule of query tiles, a ring of key
blocks.

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

from jaxtrain_kernels.context import Context
from jaxtrain_kernels.mosaic import num_cores, plgpu, swizzled, tanh
from jaxtrain_kernels.tree_attention import blocks

LOG2E = math.log2(math.e)
WARPGROUPS = 2  # that compute, and share nearly all of the multiprocessor's 65,536 registers
ROWS = 64  # queries (or keys) of a warpgroup: the rows of a wgmma
TILE = WARPGROUPS * ROWS


class Settings(NamedTuple):
    """The options of `attention`, which are compiled in."""

    scale: float
    softcap: float | None
    window: int | None

    @property
    def logit_scale(self) -> float:
        """Factor from `capped` scores to logits of base 2, in which the hardware computes exp."""
        return (self.scale if self.softcap is None else self.softcap) * LOG2E

    def capped(self, score):
        """Raw scores q.k; with a softcap tanh(q.k scale / softcap), of slope 1 - its square."""
        return score if self.softcap is None else tanh(score * (self.scale / self.softcap))

    def slope(self, weight, score):
        """`weight` times the derivative of capped scores, up to a constant factor."""
        return weight if self.softcap is None else weight * (1.0 - score * score)


def num_programs(programs: int, tiles: int) -> int:
    """Thread blocks for that many tiles, as a config wants them."""
    return tiles if programs < 0 else min(programs or num_cores(), tiles)


class TileLocation(NamedTuple):
    """Location of a tile's queries."""

    row: jax.Array
    first: jax.Array
    head: jax.Array
    part: jax.Array | int = 0
    """Which of the values' columns, where a tile has some of them alone."""


class TileVisit(NamedTuple):
    """A tile as a thread block visits it."""

    turn: jax.Array
    tile: jax.Array
    location: TileLocation
    following: TileLocation
    """Of the next turn, if it `has_next`."""
    has_next: jax.Array
    count: jax.Array
    """Steps: blocks in its list."""
    code: jax.Array
    """The first of them."""
    before: jax.Array
    """Steps of the turns before."""


class Schedule(NamedTuple):
    """Order of a thread block's query tiles: longest first, back and forth over the
    thread blocks, which balances a sorted list to within a short tile."""

    program: jax.Array
    programs: int
    rows: int
    tiles: int
    """Of a row."""
    heads: int
    lists: blocks.Lists
    parts: int = 1
    """Of the values' columns: each is a tile of its own, next to the others of its head."""

    def rounds(self):
        full_rounds, rest = divmod(self.rows * self.tiles * self.heads * self.parts, self.programs)
        return full_rounds + (self._lane(jnp.int32(full_rounds)) < rest).astype(jnp.int32)

    def go_through(self, work):
        """work(TileVisit) for every tile; the number of steps. What follows is read ahead, to hide
        the latency of the loads."""

        def body(turn, carry):
            before, tile, count, code, next_tile = carry
            # Loads of the next tile are issued before this tile's work and are done when it ends.
            following = self.lists.counts[next_tile], self.lists.codes[next_tile, 0]
            after = self._tile(turn + 2)
            location, next_location = self._locate(turn, tile), self._locate(turn + 1, next_tile)
            has_next = turn + 1 < self.rounds()
            work(TileVisit(turn, tile, location, next_location, has_next, count, code, before))
            return before + count, next_tile, *following, after

        first = self._tile(jnp.int32(0))
        start = (jnp.int32(0), first, self.lists.counts[first], self.lists.codes[first, 0])
        return lax.fori_loop(0, self.rounds(), body, (*start, self._tile(jnp.int32(1))))[0]

    def first_location(self):
        return self._locate(jnp.int32(0), self._tile(jnp.int32(0)))

    def _locate(self, turn, tile):
        row, index = lax.div(tile, jnp.int32(self.tiles)), lax.rem(tile, jnp.int32(self.tiles))
        first, parts = index * TILE, jnp.int32(self.parts)
        head = lax.rem(self._item(turn), jnp.int32(self.heads * self.parts))
        if self.parts == 1:
            return TileLocation(row, first, head)
        return TileLocation(row, first, lax.div(head, parts), lax.rem(head, parts))

    def _item(self, turn):
        """In the longest-first order; the last one for turns past the end."""
        last = self.rows * self.tiles * self.heads * self.parts - 1
        return lax.min(turn * self.programs + self._lane(turn), jnp.int32(last))

    def _tile(self, turn):
        return self.lists.order[lax.div(self._item(turn), jnp.int32(self.heads * self.parts))]

    def _lane(self, turn):
        back = jnp.int32(self.programs - 1) - self.program
        return lax.select(lax.rem(turn, jnp.int32(2)) == 0, self.program, back)


class Moved(NamedTuple):
    """K and V in the blocks' order, and the rows [B] int32 that want them: in the
    others (0) the originals are in that order already."""

    k: jax.Array
    v: jax.Array
    rows: jax.Array


class Queries(NamedTuple):
    """Inputs of the backward per query: arrays, and inside of a kernel references to them."""

    q: jax.Array
    d_out: jax.Array
    """[B, T, N, V]."""
    lse: jax.Array
    """float32 [B, N, T], base 2; +inf where a query sees nothing, so that its weights are 0."""
    delta: jax.Array
    """float32 [B, N, T]: rowsum(dO O)."""


class Keys(NamedTuple):
    """Keys in the blocks' order: arrays, and inside of a kernel references to them."""

    k: jax.Array
    v: jax.Array
    since: jax.Array
    until: jax.Array
    lists: blocks.Lists
    """Which blocks each tile of the kernel visits."""
    query_positions: jax.Array | None
    """int32 [B, T]; this and the keys' own with a window alone."""
    positions: jax.Array | None
    moved: Moved | None
    """None: `k` and `v` are in that order in every row."""


def describe_keys(k, v, context: Context, lists: blocks.Lists, moved: Moved | None) -> Keys:
    """A kernel's keys; `context` in the blocks' order, as `blocks.prepare` returns it."""
    positions = context.positions, context.key_positions
    return Keys(k, v, context.since, context.until, lists, *positions, moved)


def is_moved(keys: Keys, row):
    """True if a row of the batch is read from `keys.moved`; None if none is."""
    return None if keys.moved is None else keys.moved.rows[row]


def copy_block(moved, keys: Keys, name: str, source, target, ready):
    """TMA of `source` from the array ("k" or "v") that is in the blocks' order; `moved` as
    `is_moved` has it."""
    original = getattr(keys, name)
    if moved is None:
        plgpu.copy_gmem_to_smem(original.at[source], target, ready)
        return

    @pl.when(moved > 0)
    def _():
        plgpu.copy_gmem_to_smem(getattr(keys.moved, name).at[source], target, ready)

    @pl.when(moved == 0)
    def _():
        plgpu.copy_gmem_to_smem(original.at[source], target, ready)


class KeyRing(NamedTuple):
    """Buffers of key blocks; K and V have their own numbers of stages.

    A `ready` barrier completes when all copies into its buffer have landed, a `free` one when both
    compute warpgroups have done with it. What masks need comes with K and goes with it.
    """

    k: jax.Ref
    v: jax.Ref
    since: jax.Ref | None
    until: jax.Ref | None
    k_ready: jax.Ref
    k_free: jax.Ref
    v_ready: jax.Ref
    v_free: jax.Ref
    positions: jax.Ref | None = None
    packed: jax.Ref | None = None
    """since, until and with a window positions in one buffer: each buffer begins at a multiple of
    1,024 bytes."""

    def unpacked(self) -> "KeyRing":
        """Inside of a kernel, with the parts of `packed` in their places."""
        if self.packed is None:
            return self
        parts = [self.packed.at[i] for i in range(self.packed.shape[0])]
        names = ("since", "until", "positions")
        return self._replace(packed=None, **dict(zip(names, parts, strict=False)))


class RingShape(NamedTuple):
    """Keys of a block, buffers of K and of V."""

    block: int
    k_stages: int
    v_stages: int

    def k_slot(self, step):
        return lax.rem(step, jnp.int32(self.k_stages))

    def v_slot(self, step):
        return lax.rem(step, jnp.int32(self.v_stages))

    def ring(self, head_dim: int, v_dim: int, dtype, window: bool, packed: bool = False) -> KeyRing:
        """The scratch memory of a `KeyRing`."""
        size = self.k_stages, self.block
        per_key = None if packed else plgpu.SMEM(size, jnp.int32)
        free = {"num_arrivals": WARPGROUPS}
        return KeyRing(
            k=swizzled((self.k_stages, self.block, head_dim), dtype),
            # A product's terms are a multiple of what lies in a row of the swizzled layout.
            v=swizzled((self.v_stages, self.block, v_dim), dtype, min(self.block, 64)),
            since=per_key,
            until=per_key,
            # One arrival for each copy: K, since, until and, with a window, positions.
            k_ready=plgpu.Barrier(num_barriers=self.k_stages, num_arrivals=4 if window else 3),
            k_free=plgpu.Barrier(num_barriers=self.k_stages, **free),
            v_ready=plgpu.Barrier(num_barriers=self.v_stages),
            v_free=plgpu.Barrier(num_barriers=self.v_stages, **free),
            positions=per_key if window else None,
            packed=plgpu.SMEM((3 if window else 2, *size), jnp.int32) if packed else None,
        )


def serve(schedule: Schedule, keys: Keys, ring: KeyRing, shape: RingShape, registers: int) -> None:
    """Run the memory warpgroup, with `registers` registers per thread."""
    plgpu.set_max_registers(registers, action="decrease")
    together = schedule.heads // keys.k.shape[2]

    def work(visit):
        feed(visit, keys, ring, shape, lax.div(visit.location.head, jnp.int32(together)))

    drain(schedule.go_through(work), ring, shape)


def feed(visit: TileVisit, keys: Keys, ring: KeyRing, shape: RingShape, kv_head) -> None:
    """The memory warpgroup's part of a tile: its key blocks into the ring.

    Queries are no part of it: it must wait for nothing but free buffers of the ring, else it could
    keep from one compute warpgroup what the other waits for that one to do.
    """
    moved = is_moved(keys, visit.location.row)

    def step(i, code):
        next_code = next_code_of(keys, visit, i)
        k_slot, v_slot = shape.k_slot(visit.before + i), shape.v_slot(visit.before + i)
        block = lax.shift_right_logical(code, 1)
        part = pl.ds(pl.multiple_of(block * shape.block, shape.block), shape.block)

        # Steps are counted over all tiles of the thread block: slots and barrier phases go on from
        # one tile to the next, and the first round of the ring finds it empty.
        @pl.when(visit.before + i >= shape.k_stages)
        def _():
            plgpu.barrier_wait(ring.k_free.at[k_slot])

        ready, key_block = ring.k_ready.at[k_slot], (visit.location.row, part, kv_head)
        copy_block(moved, keys, "k", key_block, ring.k.at[k_slot], ready)
        for source, target in (
            (keys.since, ring.since),
            (keys.until, ring.until),
            (keys.positions, ring.positions),
        ):
            if source is not None:
                plgpu.copy_gmem_to_smem(
                    source.at[visit.location.row, part], target.at[k_slot], ready
                )

        @pl.when(visit.before + i >= shape.v_stages)
        def _():
            plgpu.barrier_wait(ring.v_free.at[v_slot])

        ready, width = ring.v_ready.at[v_slot], ring.v.shape[-1]
        if width < keys.v.shape[-1]:
            key_block = (
                *key_block,
                pl.ds(pl.multiple_of(visit.location.part * width, width), width),
            )
        copy_block(moved, keys, "v", key_block, ring.v.at[v_slot], ready)
        return next_code

    lax.fori_loop(0, visit.count, step, visit.code)


def next_code_of(keys: Keys, visit: TileVisit, i):
    """Code of the step after i, read a step early to hide the load; the last step gets its own
    again, for there may be nothing behind it."""
    return keys.lists.codes[visit.tile, lax.min(i + 1, visit.count - 1)]


def drain(steps, ring: KeyRing, shape: RingShape) -> None:
    """Leave no barrier phase of the ring unobserved."""

    @pl.loop(lax.max(steps - shape.k_stages, 0), steps)
    def _(i):
        plgpu.barrier_wait(ring.k_free.at[shape.k_slot(i)])

    @pl.loop(lax.max(steps - shape.v_stages, 0), steps)
    def _(i):
        plgpu.barrier_wait(ring.v_free.at[shape.v_slot(i)])


def seen_in(ring: KeyRing, slot, first, position, block: int, window: int | None):
    """bool [ROWS, block]: which keys of a ring's buffer the queries from `first` on see."""
    wgmma = plgpu.Layout.WGMMA

    def column(ref):
        values = plgpu.load(ref.at[slot], layout=wgmma.reduce(0))
        return lax.broadcast_in_dim(values, (ROWS, block), [1])

    q_index = plgpu.broadcasted_iota(jnp.int32, (ROWS, block), 0, layout=wgmma) + first
    seen = (q_index >= column(ring.since)) & (q_index < column(ring.until))
    if window is not None:
        query_position = lax.broadcast_in_dim(position, (ROWS, block), [0])
        seen &= query_position - column(ring.positions) < window
    # TMA overwrites what was just read into registers: order the two. It is another path to memory
    # (the async proxy), which the arrival at a barrier alone does not order behind these reads.
    plgpu.commit_smem()
    return seen
