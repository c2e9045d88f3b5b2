"""Tree attention forward for Hopper, Pallas Mosaic GPU.

A tile is 2 x 64 queries of one head, and its list of key blocks comes through a ring of buffers
(gpu_tiles.py). Two compute warpgroups take turns: one multiplies while the other does its softmax,
after FlashAttention-3 (arXiv 2407.08608). The mask is evaluated only in blocks that need it. The
log-sum-exp is kept in base 2.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxtrain_kernels.mosaic import opaque, plgpu, swizzled, tanh
from jaxtrain_kernels.tree_attention import gpu_tiles
from jaxtrain_kernels.tree_attention.blocks import Keys, Lists
from jaxtrain_kernels.tree_attention.gpu_tiles import LOG2E, ROWS, TILE, WARPGROUPS, Moved


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of the forward kernel."""

    k_block: int = 128
    stages: int = 2
    q_stages: int = 2
    """Tiles whose queries are in flight."""
    programs: int = -1
    """Thread blocks that share the tiles; -1: one per tile, 0: one per multiprocessor."""
    in_registers: bool = False
    """Hold a tile's queries in registers: less traffic with shared memory."""
    compute_registers: int = 232
    memory_registers: int = 40


def heuristic(head_dim: int) -> Config:
    return Config(k_block=64, q_stages=1) if head_dim == 256 else Config()


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
    bk, q_stages = config.k_block, config.q_stages
    num_tiles = T // TILE
    programs = gpu_tiles.num_programs(config.programs, B * num_tiles * N)
    shape = gpu_tiles.Shape(bk, config.stages, config.stages)
    logit_scale = (scale if softcap is None else softcap) * LOG2E
    wgmma = plgpu.Layout.WGMMA
    per_row = wgmma.reduce(1)

    def kernel(q_ref, *refs):
        position_ref, keys, order_ref, counts_ref, refs = gpu_tiles.key_refs(refs, window, moved)
        out_ref, lse_ref, q_smem, lse_smem, q_ready, turn, *refs = refs
        ring = gpu_tiles.Ring(*refs)

        group = lax.axis_index("group")
        schedule = gpu_tiles.Schedule(
            lax.axis_index("program"), programs, B, num_tiles, N, order_ref, counts_ref, keys.codes
        )

        def buffer_of(turn):
            return lax.rem(turn, jnp.int32(q_stages)) * WARPGROUPS

        def load_queries(turn, place):
            mine = buffer_of(turn) + group
            source = q_ref.at[place.row, pl.ds(place.first + group * ROWS, ROWS), place.head]
            plgpu.copy_gmem_to_smem(source, q_smem.at[mine], q_ready.at[mine])

        def take_turns():
            plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(turn)

        @pl.when(group < WARPGROUPS)
        def compute():
            plgpu.set_max_registers(config.compute_registers, action="increase")
            load_queries(jnp.int32(0), schedule.first_place())
            pl.when(group == 1)(take_turns)

            def work(now):
                row, first, head = now.place
                first, mine = first + group * ROWS, buffer_of(now.turn) + group
                rows = pl.ds(first, ROWS)
                before, count = now.before, now.count
                position = None
                if window is not None:
                    position = plgpu.load(
                        position_ref.at[row, rows], layout=per_row, optimized=False
                    )
                plgpu.barrier_wait(q_ready.at[mine])
                held = plgpu.load(q_smem.at[mine], layout=wgmma) if config.in_registers else None
                top = plgpu.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), per_row)
                total = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), per_row)
                acc = plgpu.layout_cast(jnp.zeros((ROWS, H), jnp.float32), wgmma)

                @pl.when(count > 0)
                def _():
                    plgpu.barrier_wait(ring.k_ready.at[shape.k_slot(before)])

                def step(i, carry):
                    acc, top, total, code = carry
                    slot = shape.k_slot(before + i)
                    next_code = keys.codes[now.tile, lax.min(i + 1, count - 1)]

                    def scores(ref):
                        queries = q_smem.at[opaque(mine) if H == 256 else mine]
                        left = held if config.in_registers else queries
                        plgpu.wgmma(ref, left, ring.k.at[slot].transpose((1, 0)))
                        take_turns()
                        return ref[...]

                    score = pl.run_scoped(scores, plgpu.ACC((ROWS, bk), jnp.float32))
                    if softcap is not None:
                        score = tanh(score * (scale / softcap))

                    def masked():
                        seen = gpu_tiles.seen_in(ring, slot, first, position, bk, window)
                        return jnp.where(seen, score, -jnp.inf)

                    score = lax.cond((code & 1) == 1, masked, lambda: score)
                    plgpu.barrier_arrive(ring.k_free.at[slot])
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
                        plgpu.barrier_wait(ring.v_ready.at[slot])
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
                        plgpu.wgmma(ref, low, ring.v.at[slot])

                        @pl.when(i + 1 < count)
                        def _():
                            plgpu.barrier_wait(ring.k_ready.at[shape.k_slot(before + i + 1)])

                    acc = pl.run_state(values)(plgpu.ACC.init(acc))
                    plgpu.barrier_arrive(ring.v_free.at[slot])
                    return acc, new_top, total, next_code

                acc, top, total, _ = lax.fori_loop(0, count, step, (acc, top, total, now.code))
                if q_stages > 1:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the tile before
                    pl.when(now.more)(lambda: load_queries(now.turn + 1, now.following))
                inverse = jnp.where(total == 0.0, 0.0, 1.0 / total)
                acc *= lax.broadcast_in_dim(inverse, (ROWS, H), [0])
                q_smem[mine] = acc.astype(q.dtype)  # the queries are used up: their buffer is free
                lse_smem[mine] = jnp.where(total == 0.0, jnp.inf, top + jnp.log(total) * LOG2E)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(q_smem.at[mine], out_ref.at[row, rows, head])
                plgpu.copy_smem_to_gmem(lse_smem.at[mine], lse_ref.at[row, head, rows])
                if q_stages == 1:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    pl.when(now.more)(lambda: load_queries(now.turn + 1, now.following))

            schedule.go_through(work)
            pl.when(group == 0)(take_turns)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(group == WARPGROUPS)
        def memory():
            plgpu.set_max_registers(config.memory_registers, action="decrease")

            def work(now):
                kv_head = lax.div(now.place.head, jnp.int32(N // K))
                gpu_tiles.feed(now, keys, ring, shape, kv_head)

            gpu_tiles.drain(schedule.go_through(work), ring, shape)

    buffers = q_stages * WARPGROUPS
    scratch = [
        swizzled((buffers, ROWS, H), q.dtype),
        plgpu.SMEM((buffers, ROWS), jnp.float32),
        plgpu.Barrier(num_barriers=buffers),
        plgpu.Barrier(num_arrivals=WARPGROUPS),
        *shape.scratch(H, q.dtype, window is not None),
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
    arrays = gpu_tiles.key_arrays(k, v, keys, positions, tiles, moved)
    return tuple(run(q, *arrays))
