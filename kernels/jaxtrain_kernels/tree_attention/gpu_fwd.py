"""Tree attention forward for Hopper, Pallas Mosaic GPU.

A tile is `WARPGROUPS` x 64 queries of one head: a memory warpgroup walks the tile's list of key
blocks and fills a ring of K and V buffers by TMA, two compute warpgroups take turns (one multiplies
while the other does its softmax, after FlashAttention-3, arXiv 2407.08608). A thread block works
through several tiles, and the memory warpgroup runs ahead into the next one. The mask is evaluated
only in blocks that need it. The log-sum-exp is kept in base 2.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxtrain_kernels.mosaic import num_cores, plgpu, swizzled, tanh
from jaxtrain_kernels.tree_attention.blocks import Keys, Lists

LOG2E = math.log2(math.e)
WARPGROUPS = 2
ROWS = 64  # queries of a warpgroup
TILE = WARPGROUPS * ROWS


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of the forward kernel."""

    k_block: int = 128
    stages: int = 2
    q_stages: int = 2
    """Tiles whose queries are in flight."""
    programs: int = 0
    """Thread blocks that share the tiles; 0: one per multiprocessor, -1: one per tile."""
    compute_registers: int = 232
    memory_registers: int = 40


def heuristic(head_dim: int) -> Config:
    return Config(k_block=64, q_stages=1) if head_dim == 256 else Config()


def num_programs(programs: int, tiles: int) -> int:
    """Thread blocks for that many tiles, as a config wants them."""
    return tiles if programs < 0 else min(programs or num_cores(), tiles)


class Turn(NamedTuple):
    """One tile of a thread block."""

    turn: jax.Array
    tile: jax.Array
    row: jax.Array
    first: jax.Array
    """Its first query."""
    head: jax.Array
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
        return whole + (self._place(jnp.int32(whole)) < rest).astype(jnp.int32)

    def go_through(self, work):
        """work(Turn) for every tile; the number of steps. What follows is read ahead, to hide the
        latency of the loads."""

        def body(turn, carry):
            before, tile, count, code, next_tile = carry
            following = self.counts[next_tile], self.codes[next_tile, 0]
            after = self._tile(turn + 2)
            row, part = lax.div(tile, jnp.int32(self.tiles)), lax.rem(tile, jnp.int32(self.tiles))
            head = lax.rem(self._item(turn), jnp.int32(self.heads))
            work(Turn(turn, tile, row, part * TILE, head, count, code, before))
            return before + count, next_tile, *following, after

        first = self._tile(jnp.int32(0))
        start = (jnp.int32(0), first, self.counts[first], self.codes[first, 0])
        return lax.fori_loop(0, self.rounds(), body, (*start, self._tile(jnp.int32(1))))[0]

    def _item(self, turn):
        """In the longest-first order; the last one for turns past the end."""
        last = self.rows * self.tiles * self.heads - 1
        return lax.min(turn * self.programs + self._place(turn), jnp.int32(last))

    def _tile(self, turn):
        return self.order[lax.div(self._item(turn), jnp.int32(self.heads))]

    def _place(self, turn):
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


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    moved: Moved | None,
    keys: Keys,
    positions: jax.Array | None,
    tiles: Lists,
    *,
    scale: float,
    softcap: float | None,
    window: int | None,
    config: Config,
) -> tuple[jax.Array, jax.Array]:
    """Output [B, T, N, H] in q's dtype and base-2 log-sum-exp float32 [B, N, T].

    q [B, T, N, H]; k, v [B, S, K, H]; T and S multiples of the blocks. A query that sees nothing
    gets 0 and +inf. `tiles` lists key blocks of `config.k_block` for query tiles of `TILE`; `keys`
    and `tiles` are in the blocks' order.
    """
    B, T, N, H = q.shape
    K = k.shape[2]
    bk, stages, q_stages = config.k_block, config.stages, config.q_stages
    num_tiles, arrivals = T // TILE, 3 if window is None else 4
    programs = num_programs(config.programs, B * num_tiles * N)
    logit_scale = (scale if softcap is None else softcap) * LOG2E
    wgmma = plgpu.Layout.WGMMA
    per_row, per_column = wgmma.reduce(1), wgmma.reduce(0)

    def kernel(*refs):
        q_ref, k_ref, v_ref, since_ref, until_ref, *refs = refs
        k_moved_ref = v_moved_ref = moved_ref = None
        if moved is not None:
            k_moved_ref, v_moved_ref, moved_ref, *refs = refs
        if window is not None:
            position_ref, key_position_ref, *refs = refs
        order_ref, counts_ref, codes_ref, out_ref, lse_ref, *refs = refs
        q_smem, k_smem, v_smem, since_smem, until_smem, lse_smem, *refs = refs
        if window is not None:
            key_position_smem, *refs = refs
        q_ready, q_free, k_ready, k_free, v_ready, v_free, turn = refs

        group = lax.axis_index("group")
        schedule = Schedule(
            lax.axis_index("program"), programs, B, num_tiles, N, order_ref, counts_ref, codes_ref
        )

        def slot_of(step):
            return lax.rem(step, jnp.int32(stages))

        def buffer_of(turn):
            return lax.rem(turn, jnp.int32(q_stages)) * WARPGROUPS

        def take_turns():
            plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(turn)

        @pl.when(group < WARPGROUPS)
        def compute():
            plgpu.set_max_registers(config.compute_registers, action="increase")
            pl.when(group == 1)(take_turns)

            def work(now):
                first, mine = now.first + group * ROWS, buffer_of(now.turn) + group
                row, head, rows = now.row, now.head, pl.ds(first, ROWS)
                before, count = now.before, now.count
                if window is not None:
                    position = plgpu.load(
                        position_ref.at[row, rows], layout=per_row, optimized=False
                    )
                plgpu.barrier_wait(q_ready.at[mine])
                top = plgpu.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), per_row)
                total = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), per_row)
                acc = plgpu.layout_cast(jnp.zeros((ROWS, H), jnp.float32), wgmma)

                @pl.when(count > 0)
                def _():
                    plgpu.barrier_wait(k_ready.at[slot_of(before)])

                def step(i, carry):
                    acc, top, total, code = carry
                    slot = slot_of(before + i)
                    next_code = codes_ref[now.tile, lax.min(i + 1, count - 1)]

                    def scores(ref):
                        plgpu.wgmma(ref, q_smem.at[mine], k_smem.at[slot].transpose((1, 0)))
                        take_turns()
                        return ref[...]

                    score = pl.run_scoped(scores, plgpu.ACC((ROWS, bk), jnp.float32))
                    if softcap is not None:
                        score = tanh(score * (scale / softcap))

                    def spread(column):
                        return lax.broadcast_in_dim(column, (ROWS, bk), [1])

                    def masked():
                        q_index = plgpu.broadcasted_iota(jnp.int32, (ROWS, bk), 0, layout=wgmma)
                        q_index += first
                        since = plgpu.load(since_smem.at[slot], layout=per_column)
                        until = plgpu.load(until_smem.at[slot], layout=per_column)
                        seen = (q_index >= spread(since)) & (q_index < spread(until))
                        if window is not None:
                            key_position = plgpu.load(key_position_smem.at[slot], layout=per_column)
                            own = lax.broadcast_in_dim(position, (ROWS, bk), [0])
                            seen &= own - spread(key_position) < window
                        # TMA overwrites what was just read into registers: order the two.
                        plgpu.commit_smem()
                        return jnp.where(seen, score, -jnp.inf)

                    score = lax.cond((code & 1) == 1, masked, lambda: score)
                    plgpu.barrier_arrive(k_free.at[slot])
                    new_top = jnp.maximum(top, score.max(axis=1) * logit_scale)
                    base = jnp.where(new_top == -jnp.inf, 0.0, new_top)
                    decay = jnp.exp2(top - base)
                    across = lax.broadcast_in_dim(base, (ROWS, bk), [0])
                    weight = jnp.exp2(score * logit_scale - across)
                    acc *= lax.broadcast_in_dim(decay, (ROWS, H), [0])
                    total *= decay
                    low = weight.astype(q.dtype)

                    def wait_for_values():
                        plgpu.barrier_arrive(turn)
                        plgpu.barrier_wait(v_ready.at[slot])
                        plgpu.barrier_wait(turn)

                    if H <= 128:
                        total += weight.sum(axis=1)
                        # Keeps the softmax ahead of the barrier, where the other group multiplies.
                        kept = lax.optimization_barrier((acc, total, new_top, low))
                        acc, total, new_top, low = kept
                        wait_for_values()
                    else:
                        wait_for_values()
                        total += weight.sum(axis=1)

                    def values(ref):
                        plgpu.wgmma(ref, low, v_smem.at[slot])

                        @pl.when(i + 1 < count)
                        def _():
                            plgpu.barrier_wait(k_ready.at[slot_of(before + i + 1)])

                    acc = pl.run_state(values)(plgpu.ACC.init(acc))
                    plgpu.barrier_arrive(v_free.at[slot])
                    return acc, new_top, total, next_code

                acc, top, total, _ = lax.fori_loop(0, count, step, (acc, top, total, now.code))
                inverse = jnp.where(total == 0.0, 0.0, 1.0 / total)
                acc *= lax.broadcast_in_dim(inverse, (ROWS, H), [0])
                q_smem[mine] = acc.astype(q.dtype)  # the queries are used up: their buffer is free
                lse_smem[mine] = jnp.where(total == 0.0, jnp.inf, top + jnp.log(total) * LOG2E)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(q_smem.at[mine], out_ref.at[row, rows, head])
                plgpu.copy_smem_to_gmem(lse_smem.at[mine], lse_ref.at[row, head, rows])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(q_free.at[mine])

            schedule.go_through(work)
            pl.when(group == 0)(take_turns)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(group == WARPGROUPS)
        def memory():
            plgpu.set_max_registers(config.memory_registers, action="decrease")

            def work(now):
                row, head, kv_head = now.row, now.head, lax.div(now.head, jnp.int32(N // K))
                before, count = now.before, now.count
                is_moved = None if moved is None else moved_ref[row]
                for number in range(WARPGROUPS):
                    mine = buffer_of(now.turn) + number
                    rows = pl.ds(now.first + number * ROWS, ROWS)

                    @pl.when(now.turn >= q_stages)
                    def _(mine=mine):
                        plgpu.barrier_wait(q_free.at[mine])

                    plgpu.copy_gmem_to_smem(
                        q_ref.at[row, rows, head], q_smem.at[mine], q_ready.at[mine]
                    )

                def step(i, code):
                    next_code = codes_ref[now.tile, lax.min(i + 1, count - 1)]
                    slot, filled = slot_of(before + i), before + i >= stages
                    block = lax.shift_right_logical(code, 1)
                    part = pl.ds(pl.multiple_of(block * bk, bk), bk)

                    @pl.when(filled)
                    def _():
                        plgpu.barrier_wait(k_free.at[slot])

                    ready, place = k_ready.at[slot], (row, part, kv_head)
                    copy_block(is_moved, k_ref, k_moved_ref, place, k_smem.at[slot], ready)
                    plgpu.copy_gmem_to_smem(since_ref.at[row, part], since_smem.at[slot], ready)
                    plgpu.copy_gmem_to_smem(until_ref.at[row, part], until_smem.at[slot], ready)
                    if window is not None:
                        plgpu.copy_gmem_to_smem(
                            key_position_ref.at[row, part], key_position_smem.at[slot], ready
                        )

                    @pl.when(filled)
                    def _():
                        plgpu.barrier_wait(v_free.at[slot])

                    ready = v_ready.at[slot]
                    copy_block(is_moved, v_ref, v_moved_ref, place, v_smem.at[slot], ready)
                    return next_code

                lax.fori_loop(0, count, step, now.code)

            steps = schedule.go_through(work)

            @pl.loop(lax.max(steps - stages, 0), steps)
            def _(i):  # leave no barrier phase unobserved
                plgpu.barrier_wait(k_free.at[slot_of(i)])
                plgpu.barrier_wait(v_free.at[slot_of(i)])

            @pl.loop(lax.max(schedule.rounds() - q_stages, 0), schedule.rounds())
            def _(i):
                for number in range(WARPGROUPS):
                    plgpu.barrier_wait(q_free.at[buffer_of(i) + number])

    per_key = plgpu.SMEM((stages, bk), jnp.int32)
    buffers = q_stages * WARPGROUPS
    scratch = [
        swizzled((buffers, ROWS, H), q.dtype),
        swizzled((stages, bk, H), q.dtype),
        swizzled((stages, bk, H), q.dtype),
        per_key,
        per_key,
        plgpu.SMEM((buffers, ROWS), jnp.float32),
        *([] if window is None else [per_key]),
        plgpu.Barrier(num_barriers=buffers),
        plgpu.Barrier(num_barriers=buffers),
        plgpu.Barrier(num_barriers=stages, num_arrivals=arrivals),
        plgpu.Barrier(num_barriers=stages, num_arrivals=WARPGROUPS),
        plgpu.Barrier(num_barriers=stages),
        plgpu.Barrier(num_barriers=stages, num_arrivals=WARPGROUPS),
        plgpu.Barrier(num_arrivals=WARPGROUPS),
    ]
    run = plgpu.kernel(
        kernel,
        out_type=[
            jax.ShapeDtypeStruct((B, T, N, H), q.dtype),
            jax.ShapeDtypeStruct((B, N, T), jnp.float32),
        ],
        scratch_types=scratch,
        grid=(programs,),
        grid_names=("program",),
        num_threads=WARPGROUPS + 1,
        thread_name="group",
        kernel_name="tree_attention_fwd",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    window_arrays = [] if window is None else [positions, keys.positions]
    moved_arrays = [] if moved is None else list(moved)
    return tuple(run(q, k, v, keys.since, keys.until, *moved_arrays, *window_arrays, *tiles))
