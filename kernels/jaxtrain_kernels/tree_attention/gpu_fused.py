"""dQ, dK and dV of tree attention in one kernel: Hopper, Pallas Mosaic GPU, head dims 64 and 128.

The dK, dV kernel (gpu_dkv.py) makes dQ as well: 5 matmuls for the 7 of two kernels. dS goes through
shared memory, one step later each warpgroup multiplies its share of it by all 128 keys, and TMA
adds the product to dQ in memory, in whatever order thread blocks come. Deterministic all the same:
dQ is summed in int32 (fixed_point.py), and integers have one sum in any order.

A warpgroup has dS' of its own 64 keys, and dQ = dS K wants those of all. So both write into one
slot [128 keys, queries], `ds_ready` completes when both have, and the product is queued in the step
after, behind that step's scores, while which the other may come. Of two slots one is written while
the other may still be read. A third is not needed: whoever writes dS of step i + 2 has waited for
`ds_ready` of i + 1, and before it arrived there the other had finished its product of i.

At head dim 128 a step has 64 queries, and a warpgroup's share of its dQ is half of the columns. At
64 half of the columns would be 32, whose product reads shared memory for longer than it multiplies.
So there a step has 128 queries, and the share is 64 of them with all columns. Their scores would
fill the registers; they come in two parts of 64.

`Config.ahead` is for head dim 64, whose dK and dV leave room for a second part's scores. A step of
the dK, dV kernel waits for S', then for dP', and the softmax stands between; ahead, S' was queued a
part before and dP' runs behind the softmax:

    dP' = V dO' - delta   its accumulator begins with -delta
    P' = 2^(S' - lse)     meanwhile dP' is made, and dK of the part before
    dQ of the step before is queued (in the first part)
    dV += P' dO
    dS' = P' dP'          meanwhile dQ and dV
    S' of the next part   (in the second part ahead of dV, for no dQ is in registers)
    dK += dS' Q
    dQ to memory          meanwhile S' and dK
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxtrain_kernels.mosaic import launch, nearest_int, opaque, plgpu, swizzled, zeros
from jaxtrain_kernels.tree_attention import fixed_point, gpu_dkv
from jaxtrain_kernels.tree_attention.fixed_point import Scales
from jaxtrain_kernels.tree_attention.gpu_tiles import (
    ROWS,
    TILE,
    WARPGROUPS,
    Keys,
    Queries,
    Settings,
)

SLOTS = 2  # of dS


@dataclasses.dataclass(frozen=True)
class Config(gpu_dkv.Config):
    """Sizes of the kernel: those of dK and dV, and more."""

    q_part: int = 64
    """Queries of a step whose scores are in registers at a time."""
    ahead: bool = False
    """Queue a part's scores in the part before. Head dim 128 has no registers for it."""
    in_registers: bool = False
    """Hold values, and unless `ahead` keys, in registers: less traffic with shared memory."""


def heuristic(head_dim: int) -> Config:
    return Config(q_block=128, ahead=True) if head_dim == 64 else Config()


def takes(head_dim: int, window: int | None) -> bool:
    """Is it written for this? With a window there would be no room for positions, and its few pairs
    a query would not pay for the passes over dQ."""
    return head_dim in (64, 128) and window is None


class Scratch(NamedTuple):
    """Scratch memory of the kernel besides that of dK and dV."""

    k: jax.Ref
    """[128 keys, H]: keys divided by their columns' powers of two."""
    ds: jax.Ref
    """[SLOTS * 128 keys, q_block] in low precision."""
    dq: jax.Ref
    """int32 [2, 64, columns]: on its way to memory, the share of each warpgroup."""
    ds_ready: jax.Ref


class PendingStep(NamedTuple):
    """A step whose dQ is yet to be added."""

    code: jax.Array
    units: jax.Array
    """[64] in registers: of the queries in the warpgroup's share."""


def backward(
    queries: Queries, keys: Keys, settings: Settings, config: Config
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dQ [B, T, N, H], and dK and dV as `gpu_dkv.dkv`."""
    units = fixed_point.find_units(queries.d_out, queries.delta, keys.v)
    scales = Scales(fixed_point.find_columns(keys.k), units)
    # Thread blocks add to it in any order; int32 sums do not depend on the order.
    total = jax.new_ref(zeros(queries.q.shape, jnp.int32))
    dk, dv = _run(queries, keys, settings, config, scales, total)
    dq = fixed_point.value_of(jax.freeze(total), scales, settings.scale, queries.q.dtype)
    return dq, dk, dv


def _run(
    queries: Queries,
    keys: Keys,
    settings: Settings,
    config: Config,
    scales: Scales,
    dq_sum: jax.Ref,
) -> tuple[jax.Array, jax.Array]:
    """dK and dV as `gpu_dkv.dkv`; dQ / scale, in the units of `scales`, is added to `dq_sum`, a ref
    of int32 [B, T, N, H]."""
    assert config.q_stages > 1, "a slot is released one step late"
    B, S, K, H = keys.k.shape
    assert takes(H, settings.window)
    dtype, bq, part = queries.q.dtype, config.q_block, config.q_part
    starts = range(0, bq, part)
    by_columns = bq == ROWS  # share of a warpgroup in a step's dQ: columns, or queries
    assert by_columns or bq == WARPGROUPS * ROWS
    width = H // WARPGROUPS if by_columns else H
    wgmma = plgpu.Layout.WGMMA
    if config.ahead:  # where dP' begins with it
        queries = queries._replace(delta=-queries.delta)

    def kernel(
        queries: Queries,
        keys: Keys,
        scales: Scales,
        dq_ref,
        dk_ref,
        dv_ref,
        extra: Scratch,
        smem: gpu_dkv.Scratch,
    ):
        group = lax.axis_index("group")
        tile = gpu_dkv.begin(queries, keys, smem, settings, config)

        def ds_slot(step):
            return lax.rem(step + SLOTS, jnp.int32(SLOTS))

        @pl.when(group < WARPGROUPS)
        def compute():
            plgpu.set_max_registers(config.compute_registers, action="increase")
            key_share = tile.load_keys(group, shared=False)
            held = {}
            if config.in_registers:
                names = ["v"] if config.ahead else ["k", "v"]
                held = {
                    n: plgpu.load(getattr(smem, n).at[key_share.held], layout=wgmma) for n in names
                }

            def divide_keys():
                columns = scales.columns.at[tile.row, tile.kv_head]
                columns = plgpu.load(columns, layout=wgmma.reduce(0), optimized=False)
                k = plgpu.load(smem.k.at[key_share.held], layout=wgmma)
                k = k.astype(jnp.float32) / lax.broadcast_in_dim(columns, (ROWS, H), [1])
                extra.k[key_share.held] = k.astype(dtype)

            def parts_of(i, code):
                """A step's queries in parts."""
                step = tile.at(i, code, key_share)._replace(**held)
                return [
                    step._replace(
                        part=pl.ds(step.part.start + start, part),
                        first=step.first + start,
                        lse=step.lse.at[pl.ds(start, part)],
                        delta=step.delta.at[pl.ds(start, part)],
                    )
                    for start in starts
                ]

            def scores(ref, step_part):
                plgpu.wgmma(ref, step_part.k, smem.q.at[step_part.part].transpose((1, 0)))

            def q_gradient(ref, i):
                """Queue this group's share of dQ of a step: dS of both groups times all keys."""
                plgpu.barrier_wait(extra.ds_ready)
                ds, k = extra.ds.at[pl.ds(ds_slot(i) * TILE, TILE)], extra.k
                share = pl.ds(pl.multiple_of(opaque(group) * ROWS, ROWS), ROWS)
                if by_columns:
                    k = k.at[:, share]
                else:
                    ds = ds.at[:, share]
                plgpu.wgmma(ref, ds.transpose((1, 0)), k)

            def units_of(step):
                """Load the units of the share's queries, in the layout of the rows of dQ."""
                units = smem.delta.at[config.q_stages + step.slot]
                if not by_columns:
                    units = units.at[pl.ds(group * ROWS, ROWS)]
                return plgpu.load(units, layout=wgmma.reduce(1))

            def add_q_gradient(value, i, pending: PendingStep):
                first = pl.multiple_of(lax.shift_right_logical(pending.code, 1) * bq, bq)
                if by_columns:
                    columns = pl.ds(group * width, width)
                else:
                    first, columns = first + group * ROWS, slice(None)
                target = (tile.row, pl.ds(first, ROWS), tile.head(i), columns)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the buffer's piece before
                value *= lax.broadcast_in_dim(pending.units, (ROWS, width), [0])
                # Rounded once per block of keys: that error is deterministic, and far below the
                # unit's bound.
                extra.dq[group] = nearest_int(value, wgmma)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(extra.dq.at[group], dq_ref.at[target], reduction_op="add")

            def hold(ds, i, start):
                """dS' into its slot, from query `start` of the step on."""
                rows = pl.ds(pl.multiple_of(ds_slot(i) * TILE + group * ROWS, ROWS), ROWS)
                extra.ds[rows, start : start + ds.shape[1]] = ds
                plgpu.commit_smem()
                if start + ds.shape[1] == bq:
                    plgpu.barrier_arrive(extra.ds_ready)

            def in_turn(dk, dv, parts, pending):
                """A step whose scores are queued in it."""
                plgpu.barrier_wait(smem.q_ready.at[parts[0].slot])
                for start, step_part in zip(starts, parts, strict=True):

                    def multiply(s_acc, *dq_acc, step_part=step_part):
                        scores(s_acc, step_part)
                        if dq_acc:
                            q_gradient(*dq_acc, step_part.i - 1)
                        # Of the two in the queue, the scores come first.
                        score = plgpu.wgmma_accumulator_load(s_acc, wait_n=len(dq_acc))
                        if dq_acc:
                            d_query = plgpu.wgmma_accumulator_load(*dq_acc)
                            add_q_gradient(d_query, step_part.i - 1, pending)
                            tile.give_back_queries(step_part.i - 1)
                        low, slope = tile.weights(score, step_part, key_share)
                        d_weight = tile.d_weights(low, dv, step_part, key_share, first=bool(dq_acc))
                        return tile.d_scores(slope, d_weight, step_part)

                    ds = pl.run_scoped(multiply, s_part, *([dq_part] if start == 0 else []))
                    hold(ds, step_part.i, start)
                    if start + part == bq:
                        units = units_of(step_part)
                    plgpu.wgmma(dk, ds, smem.q.at[step_part.part])
                tile.give_back_d_out(step_part)
                return units

            def queue_scores(s_acc, step_part):
                s_acc[...] = plgpu.layout_cast(jnp.zeros((ROWS, part), jnp.float32), wgmma)
                scores(s_acc, step_part)

            def ahead(s_acc, dk, dv, parts, pending, next_code):
                """A step whose first scores are queued; queues those of the next."""
                i, slot = parts[0].i, parts[0].slot

                def queue_next(start):
                    if start + part < bq:
                        return queue_scores(s_acc, parts[starts.index(start) + 1])
                    has_next = i + 1 < tile.steps

                    @pl.when(has_next)
                    def _():
                        plgpu.barrier_wait(smem.q_ready.at[tile.slot(i + 1)])

                    # Past the last step, that step's scores again; they are not read.
                    queue_scores(s_acc, parts_of(lax.select(has_next, i + 1, i), next_code)[0])

                plgpu.barrier_wait(smem.d_out_ready.at[slot])
                for start, step_part in zip(starts, parts, strict=True):

                    def multiply(dp_acc, *dq_acc, start=start, step_part=step_part):
                        minus_delta = plgpu.load(step_part.delta, layout=wgmma.reduce(0))
                        dp_acc[...] = lax.broadcast_in_dim(minus_delta, (ROWS, part), [1])
                        plgpu.wgmma(
                            dp_acc, step_part.v, smem.d_out.at[step_part.part].transpose((1, 0))
                        )
                        # Behind the scores are dK of the part before, and dP'.
                        score = plgpu.wgmma_accumulator_load(s_acc, wait_n=2)
                        low, slope = tile.weights(score, step_part, key_share)
                        plgpu.wgmma_wait(1)  # that dK
                        if dq_acc:
                            tile.give_back_queries(i - 1)
                            q_gradient(*dq_acc, i - 1)
                        else:
                            queue_next(start)
                        plgpu.wgmma(dv, low, smem.d_out.at[step_part.part])
                        d_weight = plgpu.wgmma_accumulator_load(dp_acc, wait_n=2)
                        ds = (slope * d_weight).astype(dtype)
                        hold(ds, i, start)
                        if dq_acc:
                            queue_next(start)
                        plgpu.wgmma(dk, ds, smem.q.at[step_part.part])
                        if dq_acc:  # behind it are dV, scores and dK
                            d_query = plgpu.wgmma_accumulator_load(*dq_acc, wait_n=3)
                            add_q_gradient(d_query, i - 1, pending)

                    pl.run_scoped(multiply, s_part, *([dq_part] if start == 0 else []))
                units = units_of(parts[0])
                tile.give_back_d_out(parts[0])
                return units

            def accumulate(dk, dv, *s_acc):
                first = tile.code(0)
                if config.ahead:
                    pl.when(tile.steps > 0)(lambda: plgpu.barrier_wait(smem.q_ready.at[0]))
                    queue_scores(*s_acc, parts_of(jnp.int32(0), first)[0])
                    plgpu.wgmma_wait(0)

                def step(i, carry):
                    code, pending = carry
                    next_code, parts = tile.code(i + 1), parts_of(i, code)
                    if config.ahead:
                        units = ahead(*s_acc, dk, dv, parts, pending, next_code)
                    else:
                        units = in_turn(dk, dv, parts, pending)
                    return next_code, PendingStep(code, units)

                none = plgpu.layout_cast(jnp.zeros(ROWS, jnp.float32), wgmma.reduce(1))
                start = first, PendingStep(first, none)
                _, pending = lax.fori_loop(0, tile.steps, step, start)
                result = dk[...], dv[...]
                tile.give_back_queries(tile.steps - 1)

                @pl.when(tile.steps > 0)
                def _():
                    def last(ref):
                        q_gradient(ref, tile.steps - 1)
                        return ref[...]

                    add_q_gradient(pl.run_scoped(last, dq_part), tile.steps - 1, pending)

                return result

            @pl.when(tile.steps > 0)
            def _():  # the first step adds the dQ of a step before it: nothing
                divide_keys()
                zeros = jnp.zeros((ROWS, bq), dtype)
                hold(plgpu.layout_cast(zeros, wgmma), -1, 0)

            sizes = part, width, H
            s_part, dq_part, full_acc = (plgpu.ACC((ROWS, size), jnp.float32) for size in sizes)
            extra_accs = [s_part] if config.ahead else []
            dk, dv = pl.run_scoped(accumulate, full_acc, full_acc, *extra_accs)
            tile.hold_result(dk, dv, key_share)
            tile.send_result(dk_ref, dv_ref, key_share)
            plgpu.wait_smem_to_gmem(0)

        pl.when(group == WARPGROUPS)(lambda: tile.serve(scales.units))

    extra = Scratch(
        k=swizzled((TILE, H), dtype),
        ds=swizzled((SLOTS * TILE, bq), dtype),
        dq=swizzled((WARPGROUPS, ROWS, width), jnp.int32),
        ds_ready=plgpu.Barrier(num_arrivals=WARPGROUPS),
    )
    return tuple(
        launch(
            kernel,
            "tree_attention_bwd",
            [jax.ShapeDtypeStruct(keys.k.shape, keys.k.dtype)] * 2,
            [extra, gpu_dkv.make_scratch((H, H), dtype, settings.window, config, extra_numbers=1)],
            [queries, keys, scales, dq_sum],
            grid={"program": B * S // gpu_dkv.key_tile(H) * K},
            warpgroups=WARPGROUPS,
        )
    )
