"""Puts keys and values into another order along the row: Hopper, Pallas Mosaic GPU.

A memory-bound copy by TMA, a key at a time. Rows whose order is their own are left out: the
attention kernels then read the originals, so packed documents pay nothing.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxtrain_kernels.mosaic import plgpu

SHARED = 96 * 1024  # bytes of a thread block: two fit the 227 KiB of a multiprocessor
WIDEST = 256  # TMA moves at most as many numbers along a dim
MOST = 16  # keys of a warpgroup: copies under way for each of its barriers


def gather(order: jax.Array, moved: jax.Array | None, *arrays: jax.Array) -> list[jax.Array]:
    """Each array [B, S, K, H] with rows [b, order[b, s]] at [b, s]; order int32 [B, S].

    With `moved` int32 [B], rows b of 0 are not written at all: what they hold is undefined.
    Arrays of several shapes take a kernel each.
    """
    if len({x.shape for x in arrays}) > 1:
        return [gather(order, moved, x)[0] for x in arrays]
    B, S, K, H = arrays[0].shape
    if H > WIDEST:
        shape = (B, S, K * (H // WIDEST), WIDEST)
        gathered = gather(order, moved, *(x.reshape(shape) for x in arrays))
        return [x.reshape(B, S, K, H) for x in gathered]
    rows_per_program = SHARED // (len(arrays) * K * H * arrays[0].dtype.itemsize)
    keys = next((n for n in (16, 8, 4, 2) if n <= min(rows_per_program, MOST) and S % n == 0), 1)
    parts = S // keys

    def kernel(order_ref, moved_ref, sources, *refs):
        *targets, smem, ready = refs
        program, group = lax.axis_index("program"), lax.axis_index("group")
        row, part = lax.div(program, jnp.int32(parts)), lax.rem(program, jnp.int32(parts))
        places = pl.ds(part * keys, keys)

        @pl.when(True if moved is None else moved_ref[row] > 0)
        def _():
            for i, (source, target) in enumerate(zip(sources, targets, strict=True)):

                @pl.when(group == i)
                def _(i=i, source=source, target=target):
                    @pl.loop(0, keys)
                    def _(j):
                        key = order_ref[row, part * keys + j]
                        plgpu.copy_gmem_to_smem(source.at[row, key], smem.at[i, j], ready.at[i])

                    plgpu.barrier_wait(ready.at[i])
                    plgpu.copy_smem_to_gmem(smem.at[i], target.at[row, places])
                    plgpu.wait_smem_to_gmem(0)

    run = plgpu.kernel(
        kernel,
        out_type=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays],
        scratch_types=[
            plgpu.SMEM((len(arrays), keys, K, H), arrays[0].dtype),
            plgpu.Barrier(num_barriers=len(arrays), num_arrivals=keys),
        ],
        grid=(B * parts,),
        grid_names=("program",),
        num_threads=len(arrays),
        thread_name="group",
        kernel_name="tree_attention_gather",
    )
    return run(order, moved, arrays)
