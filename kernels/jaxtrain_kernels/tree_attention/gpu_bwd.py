"""Tree attention backward for Hopper, Pallas Mosaic GPU: dK and dV in one kernel, dQ in another.

Both are deterministic: no two thread blocks add to the same number. Given the base-2 log-sum-exp
and delta = rowsum(dO O), P = 2^(S - lse) and dS = P (dO V' - delta).

dK, dV: a thread block owns 2 x 64 keys of one key head and loops over the query blocks in the
tile's list, for every query head of that key head. Scores are held transposed (rows are keys), so
each thread's intervals are loop invariants and grouped heads add up in registers. At head dim 256
both accumulators of 64 keys do not fit the registers of one warpgroup: there the two warpgroups
share 64 keys, each accumulates half of the columns, and both compute the scores.
dQ: 2 x 64 queries of one head at a time, a loop over the key blocks, as the forward.

The dK, dV kernel can add dQ as well (`dq_sum`): 5 matmuls for 7, but not deterministic. dS goes
through shared memory, one step later each warpgroup multiplies it by half of the columns of all 128
keys, and TMA adds the product to dQ in memory.
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

FUSED_HEAD_DIM = 128  # of the kernel that adds dQ as well


@dataclasses.dataclass(frozen=True)
class DkvConfig:
    """Sizes of the dK, dV kernel."""

    q_block: int = 64
    """Queries per step."""
    q_stages: int = 2
    compute_registers: int = 240
    memory_registers: int = 24  # 2 x 240 + 24 fill the register file: with 40 the launch hangs


@dataclasses.dataclass(frozen=True)
class DqConfig:
    """Sizes of the dQ kernel."""

    k_block: int = 64
    """Keys per step."""
    k_stages: int = 2
    v_stages: int = 2
    tile_stages: int = 2
    """Tiles whose queries are in flight."""
    programs: int = -1
    """Thread blocks that share the tiles; as in the forward's config."""
    in_registers: bool = False
    """Hold a tile's Q and dO in registers: half of the matmuls' traffic with shared memory."""
    compute_registers: int = 240
    memory_registers: int = 24


def dkv_heuristic(head_dim: int) -> DkvConfig:
    return DkvConfig()


def dq_heuristic(head_dim: int, window: bool = False) -> DqConfig:
    if head_dim == 256:  # 227 KiB of shared memory; a window's key positions are a bit too much
        return DqConfig(k_stages=1 if window else 2, v_stages=1, tile_stages=1)
    return DqConfig(k_stages=3, v_stages=3) if head_dim == 64 else DqConfig()


def key_tile(head_dim: int) -> int:
    """Keys of a thread block of the dK, dV kernel."""
    return ROWS if head_dim == 256 else TILE


def dkv(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    moved: Moved | None,
    d_out: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    keys: Keys,
    positions: jax.Array | None,
    tiles: Lists,
    *,
    scale: float,
    softcap: float | None,
    window: int | None,
    config: DkvConfig,
    dq_sum: jax.Ref | None = None,
) -> tuple[jax.Array, jax.Array]:
    """dK and dV [B, S, K, H] in the blocks' order; lse and delta float32 [B, N, T], the rest as the
    forward.

    With `dq_sum`, a ref of float32 [B, T, N, H], dQ / scale is added to it as well, by TMA, in an
    order that changes from run to run. `tiles` lists query blocks of `config.q_block` for key tiles
    of `key_tile(H)`.
    """
    B, _, N, H = q.shape
    S, K = k.shape[1:3]
    bq, stages = config.q_block, config.q_stages
    assert stages > 1, "a slot is released one step late"
    shared = key_tile(H) == ROWS
    part_width = H // WARPGROUPS  # columns of dQ that a warpgroup adds
    width = H // WARPGROUPS if shared else H  # columns of dK and dV that a warpgroup owns
    num_tiles, heads = S // key_tile(H), N // K
    logit_scale = (scale if softcap is None else softcap) * LOG2E
    wgmma = plgpu.Layout.WGMMA
    per_row, per_column = wgmma.reduce(1), wgmma.reduce(0)

    def kernel(*refs):
        q_ref, do_ref, lse_ref, delta_ref, *refs = refs
        position_ref, keys, order_ref, counts_ref, refs = gpu_tiles.key_refs(refs, window, moved)
        if dq_sum is not None:
            dq_ref, *refs = refs
        dk_ref, dv_ref, *refs = refs
        if dq_sum is not None:
            ds_smem, dq_smem, ds_ready, *refs = refs
        k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem, *refs = refs
        if window is not None:
            position_smem, *refs = refs
        kv_ready, q_ready, do_ready, q_free, do_free, finished = refs

        group = lax.axis_index("group")
        program = lax.axis_index("program")
        kv_head = lax.rem(program, jnp.int32(K))
        tile = order_ref[lax.div(program, jnp.int32(K))]
        row, k_tile = lax.div(tile, jnp.int32(num_tiles)), lax.rem(tile, jnp.int32(num_tiles))
        count = counts_ref[tile]
        steps = count * heads

        def slot_of(step):
            return lax.rem(step, jnp.int32(stages))

        def part_of(step):
            return pl.ds(slot_of(step) * bq, bq)

        def code_of(step):
            step = lax.max(lax.min(step, steps - 1), 0)
            return keys.codes[tile, lax.rem(step, lax.max(count, 1))]

        def head_of(step):
            return kv_head * heads + lax.div(lax.max(step, 0), lax.max(count, 1))

        def ds_slot(step):
            return lax.rem(step + 2, jnp.int32(2))

        @pl.when(group < WARPGROUPS)
        def compute():
            plgpu.set_max_registers(config.compute_registers, action="increase")
            if shared:
                mine, held, ready = pl.ds(k_tile * ROWS, ROWS), pl.ds(0, ROWS), kv_ready.at[0]
            else:
                mine = pl.ds(k_tile * TILE + group * ROWS, ROWS)
                held, ready = pl.ds(group * ROWS, ROWS), kv_ready.at[group]

            @pl.when(group == 0 if shared else True)
            def _():
                is_moved, place = None if moved is None else keys.moved[row], (row, mine, kv_head)
                gpu_tiles.copy_block(is_moved, keys.k, keys.k_moved, place, k_smem.at[held], ready)
                gpu_tiles.copy_block(is_moved, keys.v, keys.v_moved, place, v_smem.at[held], ready)

            k_mine, v_mine = k_smem.at[held], v_smem.at[held]
            held_from = 0 if shared else group * ROWS
            columns = pl.ds(group * width, width) if shared else slice(None)
            since = plgpu.load(keys.since.at[row, mine], layout=per_row, optimized=False)
            until = plgpu.load(keys.until.at[row, mine], layout=per_row, optimized=False)
            if window is not None:
                key_position = plgpu.load(
                    keys.positions.at[row, mine], layout=per_row, optimized=False
                )
            plgpu.barrier_wait(ready)

            def q_gradient(ref, i):
                """Queue this group's columns of dQ of a step: dS of both groups times all keys."""
                plgpu.barrier_wait(ds_ready)
                ds = ds_smem.at[pl.ds(ds_slot(i) * TILE, TILE)].transpose((1, 0))
                columns = pl.ds(pl.multiple_of(opaque(group) * part_width, part_width), part_width)
                plgpu.wgmma(ref, ds, k_smem.at[:, columns])

            def add_q_gradient(value, i, code):
                first = pl.multiple_of(lax.shift_right_logical(code, 1) * bq, bq)
                place = (row, pl.ds(first, bq), head_of(i), pl.ds(group * part_width, part_width))
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                dq_smem[group] = value
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(dq_smem.at[group], dq_ref.at[place], reduction_op="add")

            def share(ds, i):
                place = pl.ds(pl.multiple_of(ds_slot(i) * TILE + group * ROWS, ROWS), ROWS)
                ds_smem[place] = ds
                plgpu.commit_smem()
                plgpu.barrier_arrive(ds_ready)

            def accumulate(dk, dv):
                def step(i, carry):
                    code, last_code = carry
                    next_code = code_of(i + 1)
                    slot, part = slot_of(i), part_of(i)
                    first = lax.shift_right_logical(code, 1) * bq
                    plgpu.barrier_wait(q_ready.at[slot])
                    here = pl.ds(pl.multiple_of(opaque(jnp.int32(held_from)), ROWS), ROWS)
                    k_mine, v_mine = k_smem.at[here], v_smem.at[here]

                    def column(x):
                        return lax.broadcast_in_dim(x, (ROWS, bq), [1])

                    def across(x):
                        return lax.broadcast_in_dim(x, (ROWS, bq), [0])

                    def weights(score):
                        """Of raw scores: P in low precision, and dS / (dP - delta)."""

                        @pl.when(i > 0)
                        def _():  # dK of the step before, which ran behind, has read its queries
                            plgpu.barrier_arrive(q_free.at[slot_of(i - 1)])

                        lse = plgpu.load(lse_smem.at[slot], layout=per_column)
                        if softcap is not None:
                            score = tanh(score * (scale / softcap))
                        weight = jnp.exp2(score * logit_scale - column(lse))

                        def masked():
                            q_index = plgpu.broadcasted_iota(jnp.int32, (ROWS, bq), 1, layout=wgmma)
                            q_index += first
                            seen = (q_index >= across(since)) & (q_index < across(until))
                            if window is not None:
                                position = plgpu.load(position_smem.at[slot], layout=per_column)
                                seen &= column(position) - across(key_position) < window
                            return jnp.where(seen, weight, 0.0)

                        weight = lax.cond((code & 1) == 1, masked, lambda: weight)
                        low = weight.astype(q.dtype)
                        return low, weight if softcap is None else weight * (1.0 - score * score)

                    def d_scores(slope, d_weight):
                        delta = plgpu.load(delta_smem.at[slot], layout=per_column)
                        return (slope * (d_weight - column(delta))).astype(q.dtype)

                    def queue_values(ref, low):
                        plgpu.barrier_wait(do_ready.at[slot])
                        plgpu.wgmma(ref, v_mine, do_smem.at[part].transpose((1, 0)))
                        plgpu.wgmma(dv, low, do_smem.at[part, columns])

                    def split():
                        def scores(ref):
                            plgpu.wgmma(ref, k_mine, q_smem.at[part].transpose((1, 0)))
                            return ref[...]

                        acc = plgpu.ACC((ROWS, bq), jnp.float32)
                        low, slope = weights(pl.run_scoped(scores, acc))

                        def d_weights(ref):
                            queue_values(ref, low)
                            return plgpu.wgmma_accumulator_load(ref, wait_n=1)

                        return d_scores(slope, pl.run_scoped(d_weights, acc))

                    def fused(s_acc, dq_acc):
                        plgpu.wgmma(s_acc, k_mine, q_smem.at[part].transpose((1, 0)))
                        q_gradient(dq_acc, i - 1)
                        score = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
                        add_q_gradient(plgpu.wgmma_accumulator_load(dq_acc), i - 1, last_code)
                        low, slope = weights(score)

                        def d_weights(ref):
                            queue_values(ref, low)
                            return plgpu.wgmma_accumulator_load(ref, wait_n=1)

                        d_weight = pl.run_scoped(d_weights, plgpu.ACC((ROWS, bq), jnp.float32))
                        ds = d_scores(slope, d_weight)
                        share(ds, i)
                        return ds

                    if dq_sum is None:
                        ds = split()
                    else:
                        ds = pl.run_scoped(
                            fused,
                            plgpu.ACC((ROWS, bq), jnp.float32),
                            plgpu.ACC((bq, part_width), jnp.float32),
                        )
                    plgpu.wgmma(dk, ds, q_smem.at[part, columns])
                    plgpu.wgmma_wait(1)  # dV has read dO; also orders reads of lse and delta
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(do_free.at[slot])
                    return next_code, code

                first = code_of(0)
                _, last_code = lax.fori_loop(0, steps, step, (first, first))
                result = dk[...], dv[...]

                @pl.when(steps > 0)
                def _():
                    plgpu.barrier_arrive(q_free.at[slot_of(steps - 1)])
                    if dq_sum is not None:

                        def last(ref):
                            q_gradient(ref, steps - 1)
                            return ref[...]

                        acc = plgpu.ACC((bq, part_width), jnp.float32)
                        add_q_gradient(pl.run_scoped(last, acc), steps - 1, last_code)

                return result

            if dq_sum is not None:  # the first step adds the dQ of a step before it: nothing

                @pl.when(steps > 0)
                def _():
                    plgpu.barrier_wait(kv_ready.at[1 - group])
                    zeros = jnp.zeros((ROWS, bq), q.dtype)
                    share(plgpu.layout_cast(zeros, wgmma), -1)

            acc = plgpu.ACC((ROWS, width), jnp.float32)
            dk, dv = pl.run_scoped(accumulate, acc, acc)
            # Keys and values are used up: their buffers take the result.
            if shared or dq_sum is not None:
                plgpu.barrier_arrive(finished)
                plgpu.barrier_wait(finished)
            k_smem[held, columns] = (dk * scale).astype(q.dtype)
            v_smem[held, columns] = dv.astype(q.dtype)
            plgpu.commit_smem()
            if shared:
                plgpu.barrier_arrive(finished)
                plgpu.barrier_wait(finished)

            @pl.when(group == 0 if shared else True)
            def _():
                plgpu.copy_smem_to_gmem(k_mine, dk_ref.at[row, mine, kv_head])
                plgpu.copy_smem_to_gmem(v_mine, dv_ref.at[row, mine, kv_head])

            plgpu.wait_smem_to_gmem(0)

        @pl.when(group == WARPGROUPS)
        def memory():
            plgpu.set_max_registers(config.memory_registers, action="decrease")

            def step(i, code):
                next_code = code_of(i + 1)
                slot, part = slot_of(i), part_of(i)
                head = head_of(i)
                first = pl.multiple_of(lax.shift_right_logical(code, 1) * bq, bq)
                rows = pl.ds(first, bq)

                @pl.when(i >= stages)
                def _():
                    plgpu.barrier_wait(q_free.at[slot])

                ready = q_ready.at[slot]
                plgpu.copy_gmem_to_smem(q_ref.at[row, rows, head], q_smem.at[part], ready)

                @pl.when(i >= stages)
                def _():
                    plgpu.barrier_wait(do_free.at[slot])

                plgpu.copy_gmem_to_smem(lse_ref.at[row, head, rows], lse_smem.at[slot], ready)
                plgpu.copy_gmem_to_smem(delta_ref.at[row, head, rows], delta_smem.at[slot], ready)
                if window is not None:
                    plgpu.copy_gmem_to_smem(
                        position_ref.at[row, rows], position_smem.at[slot], ready
                    )
                plgpu.copy_gmem_to_smem(
                    do_ref.at[row, rows, head], do_smem.at[part], do_ready.at[slot]
                )
                return next_code

            lax.fori_loop(0, steps, step, code_of(0))

            @pl.loop(lax.max(steps - stages, 0), steps)
            def _(i):  # leave no barrier phase unobserved
                plgpu.barrier_wait(q_free.at[slot_of(i)])
                plgpu.barrier_wait(do_free.at[slot_of(i)])

    window_smem = [] if window is None else [plgpu.SMEM((stages, bq), jnp.int32)]
    fused_scratch = [
        swizzled((2 * TILE, bq), q.dtype),
        swizzled((WARPGROUPS, bq, part_width), jnp.float32),
        plgpu.Barrier(num_arrivals=WARPGROUPS),
    ]
    scratch = [
        *([] if dq_sum is None else fused_scratch),
        swizzled((key_tile(H), H), q.dtype),
        swizzled((key_tile(H), H), q.dtype),
        swizzled((stages * bq, H), q.dtype),
        swizzled((stages * bq, H), q.dtype),
        plgpu.SMEM((stages, bq), jnp.float32),
        plgpu.SMEM((stages, bq), jnp.float32),
        *window_smem,
        plgpu.Barrier(num_barriers=WARPGROUPS, num_arrivals=2),
        plgpu.Barrier(num_barriers=stages, num_arrivals=3 if window is None else 4),
        plgpu.Barrier(num_barriers=stages),
        plgpu.Barrier(num_barriers=stages, num_arrivals=WARPGROUPS),
        plgpu.Barrier(num_barriers=stages, num_arrivals=WARPGROUPS),
        plgpu.Barrier(num_arrivals=WARPGROUPS),
    ]
    run = plgpu.kernel(
        kernel,
        out_type=[jax.ShapeDtypeStruct(k.shape, k.dtype)] * 2,
        scratch_types=scratch,
        grid=(B * num_tiles * K,),
        grid_names=("program",),
        num_threads=WARPGROUPS + 1,
        thread_name="group",
        kernel_name="tree_attention_dkv" if dq_sum is None else "tree_attention_bwd",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    arrays = gpu_tiles.key_arrays(k, v, keys, positions, tiles, moved)
    sums = [] if dq_sum is None else [dq_sum]
    return tuple(run(q, d_out, lse, delta, *arrays, *sums))


def dq(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    moved: Moved | None,
    d_out: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    keys: Keys,
    positions: jax.Array | None,
    tiles: Lists,
    *,
    scale: float,
    softcap: float | None,
    window: int | None,
    config: DqConfig,
) -> jax.Array:
    """dQ [B, T, N, H]; `tiles` lists key blocks of `config.k_block` for query tiles of `TILE`."""
    B, T, N, H = q.shape
    K = k.shape[2]
    bk, tile_stages = config.k_block, config.tile_stages
    shape = gpu_tiles.Shape(bk, config.k_stages, config.v_stages)
    late = config.k_stages > 1  # release a key slot one step late, behind the next step's scores
    num_tiles = T // TILE
    programs = gpu_tiles.num_programs(config.programs, B * num_tiles * N)
    logit_scale = (scale if softcap is None else softcap) * LOG2E
    wgmma = plgpu.Layout.WGMMA
    per_row = wgmma.reduce(1)

    def kernel(*refs):
        q_ref, do_ref, lse_ref, delta_ref, *refs = refs
        position_ref, keys, order_ref, counts_ref, refs = gpu_tiles.key_refs(refs, window, moved)
        dq_ref, q_smem, do_smem, q_ready, *refs = refs
        ring = gpu_tiles.Ring(*refs)

        group = lax.axis_index("group")
        schedule = gpu_tiles.Schedule(
            lax.axis_index("program"), programs, B, num_tiles, N, order_ref, counts_ref, keys.codes
        )

        def buffer_of(turn):
            return lax.rem(turn, jnp.int32(tile_stages)) * WARPGROUPS

        def load_queries(turn, place):
            rows, mine = pl.ds(place.first + group * ROWS, ROWS), buffer_of(turn) + group
            for source, target in ((q_ref, q_smem), (do_ref, do_smem)):
                part = source.at[place.row, rows, place.head]
                plgpu.copy_gmem_to_smem(part, target.at[mine], q_ready.at[mine])

        @pl.when(group < WARPGROUPS)
        def compute():
            plgpu.set_max_registers(config.compute_registers, action="increase")

            load_queries(jnp.int32(0), schedule.first_place())

            def work(now):
                row, first, head = now.place
                first, mine = first + group * ROWS, buffer_of(now.turn) + group
                rows = pl.ds(first, ROWS)
                lse = plgpu.load(lse_ref.at[row, head, rows], layout=per_row, optimized=False)
                delta = plgpu.load(delta_ref.at[row, head, rows], layout=per_row, optimized=False)
                position = None
                if window is not None:
                    position = plgpu.load(
                        position_ref.at[row, rows], layout=per_row, optimized=False
                    )
                plgpu.barrier_wait(q_ready.at[mine])
                q_held = do_held = None
                if config.in_registers:
                    q_held = plgpu.load(q_smem.at[mine], layout=wgmma)
                    do_held = plgpu.load(do_smem.at[mine], layout=wgmma)

                def accumulate(dq):
                    def step(i, code):
                        next_code = keys.codes[now.tile, lax.min(i + 1, now.count - 1)]
                        ks, vs = shape.k_slot(now.before + i), shape.v_slot(now.before + i)
                        mine = opaque(buffer_of(now.turn) + group)
                        plgpu.barrier_wait(ring.k_ready.at[ks])

                        def scores(ref):
                            left = q_held if config.in_registers else q_smem.at[mine]
                            plgpu.wgmma(ref, left, ring.k.at[ks].transpose((1, 0)))
                            return ref[...]

                        def across(x):
                            return lax.broadcast_in_dim(x, (ROWS, bk), [0])

                        score = pl.run_scoped(scores, plgpu.ACC((ROWS, bk), jnp.float32))

                        @pl.when(late & (i > 0))
                        def _():  # dQ of the step before, which ran behind, has read its keys
                            plgpu.barrier_arrive(ring.k_free.at[shape.k_slot(now.before + i - 1)])

                        if softcap is not None:
                            score = tanh(score * (scale / softcap))
                        weight = jnp.exp2(score * logit_scale - across(lse))

                        def masked():
                            seen = gpu_tiles.seen_in(ring, ks, first, position, bk, window)
                            return jnp.where(seen, weight, 0.0)

                        weight = lax.cond((code & 1) == 1, masked, lambda: weight)
                        slope = weight if softcap is None else weight * (1.0 - score * score)
                        plgpu.barrier_wait(ring.v_ready.at[vs])

                        def d_weights(ref):
                            left = do_held if config.in_registers else do_smem.at[mine]
                            plgpu.wgmma(ref, left, ring.v.at[vs].transpose((1, 0)))
                            return ref[...]

                        d_weight = pl.run_scoped(d_weights, plgpu.ACC((ROWS, bk), jnp.float32))
                        plgpu.barrier_arrive(ring.v_free.at[vs])
                        d_score = slope * (d_weight - across(delta))
                        plgpu.wgmma(dq, d_score.astype(q.dtype), ring.k.at[ks])
                        if not late:
                            plgpu.wgmma_wait(0)
                            plgpu.barrier_arrive(ring.k_free.at[ks])
                        return next_code

                    lax.fori_loop(0, now.count, step, now.code)
                    result = dq[...]

                    @pl.when(late & (now.count > 0))
                    def _():
                        last = shape.k_slot(now.before + now.count - 1)
                        plgpu.barrier_arrive(ring.k_free.at[last])

                    return result

                result = pl.run_scoped(accumulate, plgpu.ACC((ROWS, H), jnp.float32))
                if tile_stages > 1:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the tile before
                    pl.when(now.more)(lambda: load_queries(now.turn + 1, now.following))
                q_smem[mine] = (result * scale).astype(q.dtype)  # the queries are used up
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(q_smem.at[mine], dq_ref.at[row, rows, head])
                if tile_stages == 1:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    pl.when(now.more)(lambda: load_queries(now.turn + 1, now.following))

            schedule.go_through(work)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(group == WARPGROUPS)
        def memory():
            plgpu.set_max_registers(config.memory_registers, action="decrease")

            def work(now):
                kv_head = lax.div(now.place.head, jnp.int32(N // K))
                gpu_tiles.feed(now, keys, ring, shape, kv_head)

            gpu_tiles.drain(schedule.go_through(work), ring, shape)

    buffers = tile_stages * WARPGROUPS
    scratch = [
        swizzled((buffers, ROWS, H), q.dtype),
        swizzled((buffers, ROWS, H), q.dtype),
        plgpu.Barrier(num_barriers=buffers, num_arrivals=2),
        *shape.scratch(H, q.dtype, window is not None),
    ]
    run = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_types=scratch,
        grid=(programs,),
        grid_names=("program",),
        num_threads=WARPGROUPS + 1,
        thread_name="group",
        kernel_name="tree_attention_dq",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    arrays = gpu_tiles.key_arrays(k, v, keys, positions, tiles, moved)
    return run(q, d_out, lse, delta, *arrays)
