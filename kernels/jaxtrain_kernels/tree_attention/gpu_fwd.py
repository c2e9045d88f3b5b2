"""Tree attention forward for Hopper, Pallas Mosaic GPU.

A tile is 2 x 64 queries of one head, and its list of key blocks comes through a ring of buffers
(gpu_tiles.py). Two compute warpgroups take turns: one multiplies while the other does its softmax,
after FlashAttention-3 (arXiv 2407.08608). The mask is evaluated only in blocks that need it. The
log-sum-exp is kept in base 2.

Values of 512 columns do not fit a warpgroup's registers: a tile takes half of them, and the two
tiles of the same queries compute the same scores. Two warpgroups that share 64 queries would do the
same work, but a block of keys would serve 64 queries for the 128 of here.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxtrain_kernels.mosaic import exp2_partly, launch, opaque, plgpu, swizzled
from jaxtrain_kernels.tree_attention import gpu_tiles
from jaxtrain_kernels.tree_attention.gpu_tiles import LOG2E, ROWS, TILE, WARPGROUPS, Keys, Settings


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of the forward kernel."""

    k_block: int = 128
    """Keys per step."""
    stages: int = 2
    """Blocks of keys, and of values, in flight."""
    q_stages: int = 2
    """Tiles whose queries are in flight."""
    programs: int = -1
    """Thread blocks that share the tiles; -1: one per tile, 0: one per multiprocessor."""
    in_registers: bool = False
    """Hold a tile's queries in registers: less traffic with shared memory."""
    polynomial: int = 0
    """Of each so many exponentials one is made by additions and multiplications; 0: none."""
    ahead: bool = False
    """Queue a step's scores ahead of the softmax of the step before, in place of taking turns."""
    compute_registers: int = 232
    """Of each thread; 2 x 232 + 40 fill the register file, as 2 x 240 + 24 do."""
    memory_registers: int = 40


WIDEST = 256  # values' columns of a tile: a warpgroup's accumulator is half of its registers then


def heuristic(head_dim: int) -> Config:
    # At 512 a tile's queries are 128 KiB, two stages of 32 keys 64, of half of their values 32.
    if head_dim == 512:
        return Config(k_block=32, q_stages=1)
    # At 256 two stages of 128 keys and values are 256 KiB, at 192, whose values have 128 dims, 160;
    # shared memory has 227.
    if head_dim == 256:
        return Config(k_block=64, q_stages=1)
    return Config(q_stages=1) if head_dim == 192 else Config()


class Scratch(NamedTuple):
    """Shared memory of a thread block, and its barriers."""

    q: jax.Ref
    """[buffers, ROWS, H]: queries, and at a tile's end its output."""
    lse: jax.Ref
    q_ready: jax.Ref
    turn: jax.Ref
    """Hands the tensor cores from one compute warpgroup to the other."""
    ring: gpu_tiles.KeyRing


def forward(
    q: jax.Array, keys: Keys, settings: Settings, config: Config
) -> tuple[jax.Array, jax.Array]:
    """Output [B, T, N, V] in q's dtype and base-2 log-sum-exp float32 [B, N, T].

    q [B, T, N, H], values [B, S, K, V] of V <= H; T and S multiples of the blocks. A query that
    sees nothing gets 0 and +inf.
    `keys.lists` has key blocks of `config.k_block` for query tiles of `TILE`. Values of more than
    `WIDEST` columns are cut into parts, and each computes the scores.
    """
    B, T, N, H = q.shape
    V = min(keys.v.shape[-1], WIDEST)  # of a tile
    parts = keys.v.shape[-1] // V
    # TMA takes what lies in one piece. Of some of a buffer's columns that is 8 rows.
    piece = ROWS if V == H else 8
    window = settings.window
    bk, q_stages = config.k_block, config.q_stages
    num_tiles = T // TILE
    programs = gpu_tiles.num_programs(config.programs, B * num_tiles * N * parts)
    shape = gpu_tiles.RingShape(bk, config.stages, config.stages)
    logit_scale = settings.logit_scale
    wgmma = plgpu.Layout.WGMMA
    per_row = wgmma.reduce(1)

    def kernel(q_ref, keys: Keys, out_ref, lse_ref, smem: Scratch):
        ring = smem.ring.unpacked()
        group = lax.axis_index("group")
        schedule = gpu_tiles.Schedule(
            lax.axis_index("program"), programs, B, num_tiles, N, keys.lists, parts
        )

        def buffer_of(turn):
            return lax.rem(turn, jnp.int32(q_stages)) * WARPGROUPS

        def load_queries(turn, location):
            buffer = buffer_of(turn) + group
            source = q_ref.at[
                location.row, pl.ds(location.first + group * ROWS, ROWS), location.head
            ]
            plgpu.copy_gmem_to_smem(source, smem.q.at[buffer], smem.q_ready.at[buffer])

        # `turn` completes when both have arrived. A warpgroup arrives twice in a step, when its
        # scores are queued and when its weights are ready, and always meets the other at the other
        # of the two: group 1 arrives once before it starts, and group 0 once after its end.
        def take_turns():
            plgpu.barrier_arrive(smem.turn)
            plgpu.barrier_wait(smem.turn)

        @pl.when(group < WARPGROUPS)
        def compute():
            plgpu.set_max_registers(config.compute_registers, action="increase")
            load_queries(jnp.int32(0), schedule.first_location())
            if not config.ahead:
                pl.when(group == 1)(take_turns)

            def work(visit):
                row, first, head, part = visit.location
                first, buffer = first + group * ROWS, buffer_of(visit.turn) + group
                rows = pl.ds(first, ROWS)
                before, count = visit.before, visit.count
                position = None
                if window is not None:
                    position = plgpu.load(
                        keys.query_positions.at[row, rows], layout=per_row, optimized=False
                    )
                plgpu.barrier_wait(smem.q_ready.at[buffer])
                held = plgpu.load(smem.q.at[buffer], layout=wgmma) if config.in_registers else None
                top = plgpu.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), per_row)
                total = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), per_row)
                start = (top, total, visit.code)

                def across(x, width):
                    return lax.broadcast_in_dim(x, (ROWS, width), [0])

                def masked(score, code, slot):
                    def seen():
                        seen = gpu_tiles.seen_in(ring, slot, first, position, bk, window)
                        return jnp.where(seen, score, -jnp.inf)

                    return lax.cond((code & 1) == 1, seen, lambda: score)

                def softmax(score, top):
                    """Weights of scores, the new largest logits, and what sums so far decay by."""
                    new_top = jnp.maximum(top, score.max(axis=1) * logit_scale)
                    # Rows that have seen nothing yet: exp2(-inf - 0) is 0, -inf - -inf were NaN.
                    base = jnp.where(new_top == -jnp.inf, 0.0, new_top)
                    logits = score * logit_scale - across(base, bk)
                    if config.polynomial:
                        weight = exp2_partly(logits, wgmma, config.polynomial)
                    else:
                        weight = jnp.exp2(logits)
                    return weight, new_top, jnp.exp2(top - base)

                def scores(ref, slot):
                    # Registers are short from 256 on: operands' addresses must not be computed
                    # ahead of the loop, where they would spill.
                    queries = smem.q.at[opaque(buffer) if H >= 256 else buffer]
                    lhs = held if config.in_registers else queries
                    plgpu.wgmma(ref, lhs, ring.k.at[slot].transpose((1, 0)))

                def in_turn():
                    @pl.when(count > 0)
                    def _():  # every step waits for the next one's keys behind its last product
                        plgpu.barrier_wait(ring.k_ready.at[shape.k_slot(before)])

                    def step(i, carry):
                        acc, top, total, code = carry
                        slot = shape.k_slot(before + i)
                        next_code = gpu_tiles.next_code_of(keys, visit, i)

                        def multiply(ref):
                            scores(ref, slot)
                            take_turns()  # queued: now the other one may multiply
                            return ref[...]

                        score = pl.run_scoped(multiply, plgpu.ACC((ROWS, bk), jnp.float32))
                        score = masked(settings.capped(score), code, slot)
                        plgpu.barrier_arrive(ring.k_free.at[slot])  # all of it is in registers
                        weight, new_top, decay = softmax(score, top)
                        acc *= across(decay, V)
                        total *= decay
                        low = weight.astype(q.dtype)

                        def wait_for_values():
                            plgpu.barrier_arrive(smem.turn)
                            plgpu.barrier_wait(ring.v_ready.at[shape.v_slot(before + i)])
                            plgpu.barrier_wait(smem.turn)

                        if V <= 128:
                            total += weight.sum(axis=1)
                            # Keeps the softmax ahead of the barrier: the other group multiplies.
                            pinned = lax.optimization_barrier((acc, total, new_top, low))
                            acc, total, new_top, low = pinned
                            wait_for_values()
                        else:
                            wait_for_values()
                            total += weight.sum(axis=1)

                        def values(ref):
                            plgpu.wgmma(ref, low, ring.v.at[slot])

                            @pl.when(i + 1 < count)
                            def _():
                                plgpu.barrier_wait(ring.k_ready.at[shape.k_slot(before + i + 1)])

                        acc = pl.run_state(values)(plgpu.ACC.init(acc))
                        plgpu.barrier_arrive(ring.v_free.at[slot])
                        return acc, new_top, total, next_code

                    acc = plgpu.layout_cast(jnp.zeros((ROWS, V), jnp.float32), wgmma)
                    acc, *statistics, _ = lax.fori_loop(0, count, step, (acc, *start))
                    return acc, *statistics

                def ahead(s_acc, acc):
                    def queue_scores(i):
                        """Queue the scores of step i; past the last step, its scores again, which
                        are not read."""

                        @pl.when(i < count)
                        def _():
                            plgpu.barrier_wait(ring.k_ready.at[shape.k_slot(before + i)])

                        i = lax.max(lax.min(i, count - 1), 0)
                        s_acc[...] = plgpu.layout_cast(jnp.zeros((ROWS, bk), jnp.float32), wgmma)
                        scores(s_acc, shape.k_slot(before + i))

                    def step(i, carry):
                        top, total, code = carry
                        slot, v_slot = shape.k_slot(before + i), shape.v_slot(before + i)
                        next_code = gpu_tiles.next_code_of(keys, visit, i)
                        score = plgpu.wgmma_accumulator_load(s_acc, wait_n=None)
                        score = masked(settings.capped(score), code, slot)

                        @pl.when(i + 1 < count)
                        def _():
                            plgpu.barrier_arrive(ring.k_free.at[slot])

                        weight, new_top, decay = softmax(score, top)
                        total = total * decay + weight.sum(axis=1)
                        # Keeps the softmax ahead of the wait, where values are multiplied.
                        pinned = lax.optimization_barrier((weight.astype(q.dtype), total, decay))
                        low, total, decay = pinned
                        sums = acc[...]  # waits for the step before

                        @pl.when(i > 0)
                        def _():
                            plgpu.barrier_arrive(ring.v_free.at[shape.v_slot(before + i - 1)])

                        acc[...] = sums * across(decay, V)
                        queue_scores(i + 1)
                        plgpu.barrier_wait(ring.v_ready.at[v_slot])
                        plgpu.wgmma(acc, low, ring.v.at[v_slot])
                        plgpu.wgmma_wait(1)  # the scores are made, the values may run
                        return new_top, total, next_code

                    queue_scores(jnp.int32(0))
                    plgpu.wgmma_wait(0)
                    top, total, _ = lax.fori_loop(0, count, step, start)
                    result = acc[...]

                    @pl.when(count > 0)
                    def _():
                        plgpu.barrier_arrive(ring.k_free.at[shape.k_slot(before + count - 1)])
                        plgpu.barrier_arrive(ring.v_free.at[shape.v_slot(before + count - 1)])

                    return result, top, total

                if config.ahead:
                    accs = [plgpu.ACC((ROWS, width), jnp.float32) for width in (bk, V)]
                    acc, top, total = pl.run_scoped(ahead, *accs)
                else:
                    acc, top, total = in_turn()
                if q_stages > 1:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the tile before
                    pl.when(visit.has_next)(lambda: load_queries(visit.turn + 1, visit.following))
                inverse = jnp.where(total == 0.0, 0.0, 1.0 / total)
                acc *= lax.broadcast_in_dim(inverse, (ROWS, V), [0])
                # The queries are used up: their buffer is free.
                smem.q[buffer, :, :V] = acc.astype(q.dtype)
                smem.lse[buffer] = jnp.where(total == 0.0, jnp.inf, top + jnp.log(total) * LOG2E)
                plgpu.commit_smem()
                for i in range(0, ROWS, piece):
                    source = smem.q.at[buffer, pl.ds(i, piece), :V]
                    target = (row, pl.ds(first + i, piece), head)
                    if parts > 1:
                        target = (*target, pl.ds(pl.multiple_of(part * V, V), V))
                    plgpu.copy_smem_to_gmem(source, out_ref.at[target])

                @pl.when(True if parts == 1 else part == 0)  # the others have the same
                def _():
                    plgpu.copy_smem_to_gmem(smem.lse.at[buffer], lse_ref.at[row, head, rows])

                if q_stages == 1:  # one buffer: the output must have left it
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    pl.when(visit.has_next)(lambda: load_queries(visit.turn + 1, visit.following))

            schedule.go_through(work)
            if not config.ahead:
                pl.when(group == 0)(take_turns)  # group 1 is one turn behind, see above
            plgpu.wait_smem_to_gmem(0)

        @pl.when(group == WARPGROUPS)
        def memory():
            gpu_tiles.serve(schedule, keys, ring, shape, config.memory_registers)

    buffers = q_stages * WARPGROUPS
    scratch = Scratch(
        q=swizzled((buffers, ROWS, H), q.dtype),
        lse=plgpu.SMEM((buffers, ROWS), jnp.float32),
        q_ready=plgpu.Barrier(num_barriers=buffers),
        turn=plgpu.Barrier(num_arrivals=WARPGROUPS),
        ring=shape.ring(H, V, q.dtype, window is not None, packed=parts > 1),
    )
    lse = jax.ShapeDtypeStruct((B, N, T), jnp.float32)
    return tuple(
        launch(
            kernel,
            "tree_attention_fwd",
            [jax.ShapeDtypeStruct((B, T, N, parts * V), q.dtype), lse],
            [scratch],
            [q, keys],
            grid={"program": programs},
            warpgroups=WARPGROUPS,
            reductions=parts == 1,
        )
    )
