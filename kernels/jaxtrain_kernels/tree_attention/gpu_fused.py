"""dQ, dK and dV of tree attention in one kernel: Hopper, Pallas Mosaic GPU, head dim 128.

The dK, dV kernel (gpu_dkv.py) makes dQ as well: 5 matmuls for the 7 of two kernels. dS goes through
shared memory, one step later each warpgroup multiplies it by half of the columns of all 128 keys,
and TMA adds the product to dQ in memory, in whatever order thread blocks come. Deterministic all
the same: dQ is summed in int32 (fixed_point.py), and integers have one sum in any order.

A warpgroup has dS' of its own 64 keys, and dQ = dS K wants those of all. So both write into one
slot [128 keys, queries], `ds_ready` completes when both have, and the product is queued in the step
after, behind that step's scores, while which the other may come. Of two slots one is written while
the other may still be read. A third is not needed: whoever writes dS of step i + 2 has waited for
`ds_ready` of i + 1, and before it arrived there the other had finished its product of i.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxtrain_kernels.mosaic import launch, nearest_int, opaque, plgpu, swizzled, zeros
from jaxtrain_kernels.tree_attention import fixed_point, gpu_dkv
from jaxtrain_kernels.tree_attention.fixed_point import Scales
from jaxtrain_kernels.tree_attention.gpu_dkv import Config
from jaxtrain_kernels.tree_attention.gpu_tiles import (
    ROWS,
    TILE,
    WARPGROUPS,
    Keys,
    Queries,
    Settings,
)

SLOTS = 2  # of dS


def takes(head_dim: int, window: int | None) -> bool:
    """Is it written for this? With a window there would be no room for positions, and its few pairs
    a query would not pay for the passes over dQ."""
    return head_dim == 128 and window is None


class Scratch(NamedTuple):
    """What the kernel needs beside that of dK and dV."""

    k: jax.Ref
    """[128 keys, H]: keys divided by their columns' powers of two."""
    ds: jax.Ref
    """[SLOTS * 128 keys, q_block] in low precision."""
    dq: jax.Ref
    """int32 [2, q_block, H / 2]: on its way to memory, a piece of each warpgroup."""
    ds_ready: jax.Ref


def backward(
    queries: Queries, keys: Keys, settings: Settings, config: Config
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dQ [B, T, N, H], and dK and dV as `gpu_dkv.dkv`."""
    units = fixed_point.find_units(queries.d_out, queries.delta, keys.v)
    scales = Scales(fixed_point.find_columns(keys.k), units)
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
    assert config.q_block == ROWS, "the rows of a product"
    B, S, K, H = keys.k.shape
    assert takes(H, settings.window)
    dtype, bq = queries.q.dtype, config.q_block
    width = H // WARPGROUPS  # columns of dQ that a warpgroup adds

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
            own = tile.load_keys(group, shared=False)

            def divide_keys():
                layout = plgpu.Layout.WGMMA
                columns = scales.columns.at[tile.row, tile.kv_head]
                columns = plgpu.load(columns, layout=layout.reduce(0), optimized=False)
                k = plgpu.load(smem.k.at[own.held], layout=layout)
                k = k.astype(jnp.float32) / lax.broadcast_in_dim(columns, (ROWS, H), [1])
                extra.k[own.held] = k.astype(dtype)

            def q_gradient(ref, i):
                """Queue this group's columns of dQ of a step: dS of both groups times all keys."""
                plgpu.barrier_wait(extra.ds_ready)
                ds = extra.ds.at[pl.ds(ds_slot(i) * TILE, TILE)].transpose((1, 0))
                columns = pl.ds(pl.multiple_of(opaque(group) * width, width), width)
                plgpu.wgmma(ref, ds, extra.k.at[:, columns])

            def units_of(step):
                """[q_block] of a step, in the layout of the rows of dQ."""
                layout = plgpu.Layout.WGMMA.reduce(1)
                return plgpu.load(smem.delta.at[config.q_stages + step.slot], layout=layout)

            def add_q_gradient(value, i, code, factors):
                first = pl.multiple_of(lax.shift_right_logical(code, 1) * bq, bq)
                columns = pl.ds(group * width, width)
                place = (tile.row, pl.ds(first, bq), tile.head(i), columns)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the buffer's piece before
                value *= lax.broadcast_in_dim(factors, (bq, width), [0])
                extra.dq[group] = nearest_int(value, plgpu.Layout.WGMMA)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(extra.dq.at[group], dq_ref.at[place], reduction_op="add")

            def share(ds, i):
                place = pl.ds(pl.multiple_of(ds_slot(i) * TILE + group * ROWS, ROWS), ROWS)
                extra.ds[place] = ds
                plgpu.commit_smem()
                plgpu.barrier_arrive(extra.ds_ready)

            def accumulate(dk, dv):
                def step(i, carry):
                    code, last_code, last_units = carry
                    next_code = tile.code(i + 1)
                    now = tile.enter(i, code, own)

                    def multiply(s_acc, dq_acc):
                        plgpu.wgmma(s_acc, now.k, smem.q.at[now.part].transpose((1, 0)))
                        q_gradient(dq_acc, i - 1)
                        # Of the two in the queue, the scores come first.
                        score = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
                        d_query = plgpu.wgmma_accumulator_load(dq_acc)
                        add_q_gradient(d_query, i - 1, last_code, last_units)
                        low, slope = tile.weights(score, now, own)
                        d_weight = tile.d_weights(low, dv, now, own)
                        ds = tile.d_scores(slope, d_weight, now)
                        share(ds, i)
                        return ds

                    ds = pl.run_scoped(
                        multiply,
                        plgpu.ACC((ROWS, bq), jnp.float32),
                        plgpu.ACC((bq, width), jnp.float32),
                    )
                    now_units = units_of(now)
                    tile.leave(ds, dk, now, own)
                    return next_code, code, now_units

                first = tile.code(0)
                none = plgpu.layout_cast(jnp.zeros(bq, jnp.float32), plgpu.Layout.WGMMA.reduce(1))
                start = first, first, none
                _, last_code, last_units = lax.fori_loop(0, tile.steps, step, start)
                result = dk[...], dv[...]

                @pl.when(tile.steps > 0)
                def _():
                    plgpu.barrier_arrive(smem.q_free.at[tile.slot(tile.steps - 1)])

                    def last(ref):
                        q_gradient(ref, tile.steps - 1)
                        return ref[...]

                    value = pl.run_scoped(last, plgpu.ACC((bq, width), jnp.float32))
                    add_q_gradient(value, tile.steps - 1, last_code, last_units)

                return result

            @pl.when(tile.steps > 0)
            def _():  # the first step adds the dQ of a step before it: nothing
                divide_keys()
                zeros = jnp.zeros((ROWS, bq), dtype)
                share(plgpu.layout_cast(zeros, plgpu.Layout.WGMMA), -1)

            acc = plgpu.ACC((ROWS, H), jnp.float32)
            dk, dv = pl.run_scoped(accumulate, acc, acc)
            tile.hold_result(dk, dv, own)
            tile.send_result(dk_ref, dv_ref, own)
            plgpu.wait_smem_to_gmem(0)

        pl.when(group == WARPGROUPS)(lambda: tile.serve(scales.units))

    extra = Scratch(
        k=swizzled((TILE, H), dtype),
        ds=swizzled((SLOTS * TILE, bq), dtype),
        dq=swizzled((WARPGROUPS, bq, width), jnp.int32),
        ds_ready=plgpu.Barrier(num_arrivals=WARPGROUPS),
    )
    return tuple(
        launch(
            kernel,
            "tree_attention_bwd",
            [jax.ShapeDtypeStruct(keys.k.shape, keys.k.dtype)] * 2,
            [extra, gpu_dkv.make_scratch((H, H), dtype, settings.window, config, more=1)],
            [queries, keys, scales, dq_sum],
            grid={"program": B * S // gpu_dkv.key_tile(H) * K},
            warpgroups=WARPGROUPS,
        )
    )
