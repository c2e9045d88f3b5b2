"""dQ, dK and dV of tree attention in one kernel: Hopper, Pallas Mosaic GPU, head dim 128.

The dK, dV kernel (gpu_dkv.py) makes dQ as well: 5 matmuls for the 7 of two kernels, but not
deterministic. dS goes through shared memory, one step later each warpgroup multiplies it by half of
the columns of all 128 keys, and TMA adds the product to dQ in memory, in whatever order thread
blocks come.

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

from jaxtrain_kernels.mosaic import launch, opaque, plgpu, swizzled
from jaxtrain_kernels.tree_attention import gpu_dkv
from jaxtrain_kernels.tree_attention.gpu_dkv import Config
from jaxtrain_kernels.tree_attention.gpu_tiles import (
    ROWS,
    TILE,
    WARPGROUPS,
    Keys,
    Queries,
    Settings,
)

HEAD_DIM = 128  # the only one that it is written and tested for
SLOTS = 2  # of dS


class Scratch(NamedTuple):
    """What the kernel needs beside that of dK and dV."""

    ds: jax.Ref
    """[SLOTS * 128 keys, q_block] in low precision."""
    dq: jax.Ref
    """float32 [2, q_block, H / 2]: on its way to memory, a piece of each warpgroup."""
    ds_ready: jax.Ref


def backward(
    queries: Queries, keys: Keys, settings: Settings, config: Config, dq_sum: jax.Ref
) -> tuple[jax.Array, jax.Array]:
    """dK and dV as `gpu_dkv.dkv`; dQ / scale is added to `dq_sum`, a ref of float32 [B, T, N, H],
    in an order that changes from run to run."""
    assert config.q_stages > 1, "a slot is released one step late"
    B, S, K, H = keys.k.shape
    dtype, bq = queries.q.dtype, config.q_block
    width = H // WARPGROUPS  # columns of dQ that a warpgroup adds

    def kernel(
        queries: Queries,
        keys: Keys,
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

            def q_gradient(ref, i):
                """Queue this group's columns of dQ of a step: dS of both groups times all keys."""
                plgpu.barrier_wait(extra.ds_ready)
                ds = extra.ds.at[pl.ds(ds_slot(i) * TILE, TILE)].transpose((1, 0))
                columns = pl.ds(pl.multiple_of(opaque(group) * width, width), width)
                plgpu.wgmma(ref, ds, smem.k.at[:, columns])

            def add_q_gradient(value, i, code):
                first = pl.multiple_of(lax.shift_right_logical(code, 1) * bq, bq)
                columns = pl.ds(group * width, width)
                place = (tile.row, pl.ds(first, bq), tile.head(i), columns)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the buffer's piece before
                extra.dq[group] = value
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(extra.dq.at[group], dq_ref.at[place], reduction_op="add")

            def share(ds, i):
                place = pl.ds(pl.multiple_of(ds_slot(i) * TILE + group * ROWS, ROWS), ROWS)
                extra.ds[place] = ds
                plgpu.commit_smem()
                plgpu.barrier_arrive(extra.ds_ready)

            def accumulate(dk, dv):
                def step(i, carry):
                    code, last_code = carry
                    next_code = tile.code(i + 1)
                    now = tile.enter(i, code, own)

                    def multiply(s_acc, dq_acc):
                        plgpu.wgmma(s_acc, now.k, smem.q.at[now.part].transpose((1, 0)))
                        q_gradient(dq_acc, i - 1)
                        # Of the two in the queue, the scores come first.
                        score = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
                        add_q_gradient(plgpu.wgmma_accumulator_load(dq_acc), i - 1, last_code)
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
                    tile.leave(ds, dk, now, own)
                    return next_code, code

                first = tile.code(0)
                _, last_code = lax.fori_loop(0, tile.steps, step, (first, first))
                result = dk[...], dv[...]

                @pl.when(tile.steps > 0)
                def _():
                    plgpu.barrier_arrive(smem.q_free.at[tile.slot(tile.steps - 1)])

                    def last(ref):
                        q_gradient(ref, tile.steps - 1)
                        return ref[...]

                    value = pl.run_scoped(last, plgpu.ACC((bq, width), jnp.float32))
                    add_q_gradient(value, tile.steps - 1, last_code)

                return result

            @pl.when(tile.steps > 0)
            def _():  # the first step adds the dQ of a step before it: nothing
                plgpu.barrier_wait(smem.kv_ready.at[1 - group])  # the product reads all keys
                zeros = jnp.zeros((ROWS, bq), dtype)
                share(plgpu.layout_cast(zeros, plgpu.Layout.WGMMA), -1)

            acc = plgpu.ACC((ROWS, H), jnp.float32)
            dk, dv = pl.run_scoped(accumulate, acc, acc)
            tile.meet()  # the other's last dQ is made of these keys, too
            tile.hold_result(dk, dv, own)
            tile.send_result(dk_ref, dv_ref, own)
            plgpu.wait_smem_to_gmem(0)

        pl.when(group == WARPGROUPS)(tile.serve)

    extra = Scratch(
        ds=swizzled((SLOTS * TILE, bq), dtype),
        dq=swizzled((WARPGROUPS, bq, width), jnp.float32),
        ds_ready=plgpu.Barrier(num_arrivals=WARPGROUPS),
    )
    return tuple(
        launch(
            kernel,
            "tree_attention_bwd",
            [jax.ShapeDtypeStruct(keys.k.shape, keys.k.dtype)] * 2,
            [extra, gpu_dkv.make_scratch(H, dtype, settings.window, config)],
            [queries, keys, dq_sum],
            grid={"program": B * S // gpu_dkv.key_tile(H) * K},
            warpgroups=WARPGROUPS,
        )
    )
