"""Tree attention forward for Hopper, Pallas Mosaic GPU.

A thread block owns `WARPGROUPS` x 64 queries of one head: a memory warpgroup walks the tile's list
of key blocks and fills a ring of K and V buffers by TMA, two compute warpgroups take turns (one
multiplies while the other does its softmax, after FlashAttention-3, arXiv 2407.08608). The mask is
evaluated only in blocks that need it. The log-sum-exp is kept in base 2.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxtrain_kernels.mosaic import plgpu, swizzled, tanh
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
    compute_registers: int = 232
    memory_registers: int = 40


def heuristic(head_dim: int) -> Config:
    return Config(k_block=64 if head_dim == 256 else 128)


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
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
    gets 0 and +inf. `tiles` lists key blocks of `config.k_block` for query tiles of `TILE`.
    """
    B, T, N, H = q.shape
    K = k.shape[2]
    bk, stages = config.k_block, config.stages
    num_tiles, slots = T // TILE, 3 if window is None else 4
    logit_scale = (scale if softcap is None else softcap) * LOG2E
    wgmma = plgpu.Layout.WGMMA
    per_row, per_column = wgmma.reduce(1), wgmma.reduce(0)

    def kernel(*refs):
        q_ref, k_ref, v_ref, since_ref, until_ref, *refs = refs
        if window is not None:
            position_ref, key_position_ref, *refs = refs
        order_ref, counts_ref, codes_ref, out_ref, lse_ref, *refs = refs
        q_smem, k_smem, v_smem, since_smem, until_smem, lse_smem, *refs = refs
        if window is not None:
            key_position_smem, *refs = refs
        q_ready, k_ready, v_ready, k_free, v_free, turn = refs

        group = lax.axis_index("group")
        program = lax.axis_index("program")
        head = lax.rem(program, jnp.int32(N))
        tile = order_ref[lax.div(program, jnp.int32(N))]
        row, q_tile = lax.div(tile, jnp.int32(num_tiles)), lax.rem(tile, jnp.int32(num_tiles))
        count = counts_ref[tile]

        def slot_of(step):
            return lax.rem(step, jnp.int32(stages))

        def take_turns():
            plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(turn)

        @pl.when(group < WARPGROUPS)
        def compute():
            plgpu.set_max_registers(config.compute_registers, action="increase")
            first = q_tile * TILE + group * ROWS
            rows = pl.ds(first, ROWS)
            plgpu.copy_gmem_to_smem(q_ref.at[row, rows, head], q_smem.at[group], q_ready.at[group])
            if window is not None:
                position = plgpu.load(position_ref.at[row, rows], layout=per_row, optimized=False)
            plgpu.barrier_wait(q_ready.at[group])
            top = plgpu.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), per_row)
            total = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), per_row)
            acc = plgpu.layout_cast(jnp.zeros((ROWS, H), jnp.float32), wgmma)

            @pl.when(count > 0)
            def _():
                plgpu.barrier_wait(k_ready.at[0])

            pl.when(group == 1)(take_turns)

            def step(i, carry):
                acc, top, total, code = carry
                slot = slot_of(i)
                next_code = codes_ref[tile, lax.min(i + 1, count - 1)]  # hides the load's latency

                def scores(ref):
                    plgpu.wgmma(ref, q_smem.at[group], k_smem.at[slot].transpose((1, 0)))
                    take_turns()
                    return ref[...]

                score = pl.run_scoped(scores, plgpu.ACC((ROWS, bk), jnp.float32))
                if softcap is not None:
                    score = tanh(score * (scale / softcap))

                def spread(column):
                    return lax.broadcast_in_dim(column, (ROWS, bk), [1])

                def masked():
                    q_index = plgpu.broadcasted_iota(jnp.int32, (ROWS, bk), 0, layout=wgmma) + first
                    since = plgpu.load(since_smem.at[slot], layout=per_column)
                    until = plgpu.load(until_smem.at[slot], layout=per_column)
                    seen = (q_index >= spread(since)) & (q_index < spread(until))
                    if window is not None:
                        key_position = plgpu.load(key_position_smem.at[slot], layout=per_column)
                        mine = lax.broadcast_in_dim(position, (ROWS, bk), [0])
                        seen &= mine - spread(key_position) < window
                    # TMA overwrites what was just read into registers: order the two.
                    plgpu.commit_smem()
                    return jnp.where(seen, score, -jnp.inf)

                score = lax.cond((code & 1) == 1, masked, lambda: score)
                plgpu.barrier_arrive(k_free.at[slot])
                new_top = jnp.maximum(top, score.max(axis=1) * logit_scale)
                base = jnp.where(new_top == -jnp.inf, 0.0, new_top)
                decay = jnp.exp2(top - base)
                weight = jnp.exp2(score * logit_scale - lax.broadcast_in_dim(base, (ROWS, bk), [0]))
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
                    acc, total, new_top, low = lax.optimization_barrier((acc, total, new_top, low))
                    wait_for_values()
                else:
                    wait_for_values()
                    total += weight.sum(axis=1)

                def values(ref):
                    plgpu.wgmma(ref, low, v_smem.at[slot])

                    @pl.when(i + 1 < count)
                    def _():
                        plgpu.barrier_wait(k_ready.at[slot_of(i + 1)])

                acc = pl.run_state(values)(plgpu.ACC.init(acc))
                plgpu.barrier_arrive(v_free.at[slot])
                return acc, new_top, total, next_code

            carry = (acc, top, total, codes_ref[tile, 0])
            acc, top, total, _ = lax.fori_loop(0, count, step, carry)
            pl.when(group == 0)(take_turns)

            inverse = jnp.where(total == 0.0, 0.0, 1.0 / total)
            acc *= lax.broadcast_in_dim(inverse, (ROWS, H), [0])
            q_smem[group] = acc.astype(q.dtype)  # the queries are used up: their buffer is free
            lse_smem[group] = jnp.where(total == 0.0, jnp.inf, top + jnp.log(total) * LOG2E)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q_smem.at[group], out_ref.at[row, rows, head])
            plgpu.copy_smem_to_gmem(lse_smem.at[group], lse_ref.at[row, head, rows])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(group == WARPGROUPS)
        def memory():
            plgpu.set_max_registers(config.memory_registers, action="decrease")
            kv_head = lax.div(head, jnp.int32(N // K))

            def step(i, code):
                next_code = codes_ref[tile, lax.min(i + 1, count - 1)]
                slot = slot_of(i)
                block = lax.shift_right_logical(code, 1)
                part = pl.ds(pl.multiple_of(block * bk, bk), bk)

                @pl.when(i >= stages)
                def _():
                    plgpu.barrier_wait(k_free.at[slot])

                ready = k_ready.at[slot]
                plgpu.copy_gmem_to_smem(k_ref.at[row, part, kv_head], k_smem.at[slot], ready)
                plgpu.copy_gmem_to_smem(since_ref.at[row, part], since_smem.at[slot], ready)
                plgpu.copy_gmem_to_smem(until_ref.at[row, part], until_smem.at[slot], ready)
                if window is not None:
                    plgpu.copy_gmem_to_smem(
                        key_position_ref.at[row, part], key_position_smem.at[slot], ready
                    )

                @pl.when(i >= stages)
                def _():
                    plgpu.barrier_wait(v_free.at[slot])

                plgpu.copy_gmem_to_smem(
                    v_ref.at[row, part, kv_head], v_smem.at[slot], v_ready.at[slot]
                )
                return next_code

            lax.fori_loop(0, count, step, codes_ref[tile, 0])

            @pl.loop(lax.max(count - stages, 0), count)
            def _(i):  # leave no barrier phase unobserved
                plgpu.barrier_wait(k_free.at[slot_of(i)])
                plgpu.barrier_wait(v_free.at[slot_of(i)])

    per_key = plgpu.SMEM((stages, bk), jnp.int32)
    scratch = [
        swizzled((WARPGROUPS, ROWS, H), q.dtype),
        swizzled((stages, bk, H), q.dtype),
        swizzled((stages, bk, H), q.dtype),
        per_key,
        per_key,
        plgpu.SMEM((WARPGROUPS, ROWS), jnp.float32),
        *([] if window is None else [per_key]),
        plgpu.Barrier(num_barriers=WARPGROUPS),
        plgpu.Barrier(num_barriers=stages, num_arrivals=slots),
        plgpu.Barrier(num_barriers=stages),
        plgpu.Barrier(num_barriers=stages, num_arrivals=WARPGROUPS),
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
        grid=(B * num_tiles * N,),
        grid_names=("program",),
        num_threads=WARPGROUPS + 1,
        thread_name="group",
        kernel_name="tree_attention_fwd",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    window_arrays = [] if window is None else [positions, keys.positions]
    return tuple(run(q, k, v, keys.since, keys.until, *window_arrays, *tiles))
