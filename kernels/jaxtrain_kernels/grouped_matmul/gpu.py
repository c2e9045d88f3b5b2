"""Grouped matmuls for Hopper, Pallas Mosaic GPU, on segments of whole blocks.

`product`: each block of rows times its expert's matrix or its transpose (the transpose is read in
place). `weight_gradient`: for each expert, the sum over its rows of x' dy. Both are persistent
thread blocks with a memory warpgroup and two compute warpgroups of 64 x `columns` each.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxtrain_kernels.mosaic import num_cores, plgpu, swizzle

WARPGROUPS = 2
ROWS = 64  # rows of a warpgroup
BLOCK = WARPGROUPS * ROWS


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of both kernels."""

    columns: int = 256
    depth: int = 64
    stages: int = 4
    snake: int = 8
    """Blocks of rows that are walked before the next columns: reuse in the L2 cache."""
    store: int = 64
    """Columns stored at a time."""


def fitting(columns: int) -> Config | None:
    """The sizes for a result of so many columns, None if there are none."""
    for size in (256, 128):
        if columns % size == 0:
            return Config(columns=size)
    return None


def _pipeline(body, context, config, grid, specs):
    return plgpu.emit_pipeline_warp_specialized(
        body,
        grid=grid,
        in_specs=[
            plgpu.BlockSpec(
                shape,
                index,
                transforms=swizzle(jnp.bfloat16),
                memory_space=plgpu.SMEM,
                delay_release=1,
            )
            for shape, index in specs
        ],
        memory_registers=40,
        wg_axis="group",
        num_compute_wgs=WARPGROUPS,
        max_concurrent_steps=config.stages,
        compute_context=context,
    )


def _nothing(*_, **__):
    return None


def _store(value, out_smem, out_ref, row, column, config):
    """Send [ROWS, columns] in registers to out_ref, through two buffers of `store` columns."""
    group = lax.axis_index("group")
    for j in range(config.columns // config.store):
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        out_smem[group, j % 2] = value[:, j * config.store : (j + 1) * config.store]
        plgpu.commit_smem()
        part = pl.ds(pl.multiple_of(column + j * config.store, config.store), config.store)
        rows = pl.ds(pl.multiple_of(row, 8), ROWS)
        plgpu.copy_smem_to_gmem(out_smem.at[group, j % 2], out_ref.at[rows, part])


def _launch(kernel, shape, config, name, arrays):
    staging = (WARPGROUPS, 2, ROWS, config.store)
    run = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(shape, jnp.bfloat16),
        scratch_types=[plgpu.SMEM(staging, jnp.bfloat16, transforms=swizzle(jnp.bfloat16))],
        grid=(num_cores(),),
        grid_names=("core",),
        num_threads=WARPGROUPS + 1,
        thread_name="group",
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    return run(*arrays)


def product(x, w, group, active, *, transpose: bool, config: Config):
    """bfloat16 [P, F]: x [P, D] in blocks of 128 rows times w [E, D, F] (or [E, F, D]') each.

    group int32 [P / 128], active int32 [1] as in `Segments`; unused blocks give 0.
    """
    P, D = x.shape
    F = w.shape[1] if transpose else w.shape[2]
    columns, depth = config.columns, config.depth
    blocks, across = P // BLOCK, F // columns

    def kernel(x_ref, w_ref, group_ref, active_ref, out_ref, out_smem):
        warpgroup = lax.axis_index("group")
        used = active_ref[0]

        def pipeline(body, context, block=0, column=0):
            if transpose:
                w_spec = ((columns, depth), lambda d: (column, d))
            else:
                w_spec = ((depth, columns), lambda d: (d, column))
            specs = [((BLOCK, depth), lambda d: (block, d)), w_spec]
            return _pipeline(body, context, config, (D // depth,), specs)

        buffers = pipeline(_nothing, _nothing).get_allocations(x_ref, w_ref.at[0])

        @functools.partial(pl.run_scoped, buffers=buffers, collective_axes="group")
        def _(buffers):
            @plgpu.nd_loop((blocks * across,), collective_axes="core")
            def _(loop):
                block, column = plgpu.planar_snake(
                    loop.index[0], (blocks, across), 1, min(config.snake, across)
                )
                row = block * BLOCK + warpgroup * ROWS

                def context(pipe):
                    @functools.partial(pl.run_scoped, acc=plgpu.ACC((ROWS, columns), jnp.float32))
                    def _(acc):
                        pipe(acc)
                        value = acc[...].astype(jnp.bfloat16)
                        _store(value, out_smem, out_ref, row, column * columns, config)

                def multiply(_, x_smem, w_smem, acc):
                    right = w_smem.transpose((1, 0)) if transpose else w_smem
                    plgpu.wgmma(acc, x_smem.at[pl.ds(warpgroup * ROWS, ROWS)], right)
                    plgpu.wgmma_wait(1)
                    return acc

                @pl.when(block < used)
                def _():
                    run = pipeline(multiply, context, block, column)
                    run(x_ref, w_ref.at[group_ref[block]], allocations=buffers)

                @pl.when((block >= used) & (warpgroup < WARPGROUPS))
                def _():
                    zero = jnp.zeros((ROWS, columns), jnp.bfloat16)
                    zero = plgpu.layout_cast(zero, plgpu.Layout.WGMMA)
                    _store(zero, out_smem, out_ref, row, column * columns, config)

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    return _launch(kernel, (P, F), config, "grouped_product", [x, w, group, active])


def weight_gradient(x, dy, starts, ends, *, config: Config):
    """bfloat16 [E, D, F]: x[start:end]' dy[start:end] of each expert; 0 for one without rows.

    x [P, D], dy [P, F]; starts and ends int32 [E], multiples of 128; D a multiple of 128.
    """
    D, F, E = x.shape[1], dy.shape[1], starts.shape[0]
    columns, depth = config.columns, config.depth
    down, across = D // BLOCK, F // columns

    def kernel(x_ref, dy_ref, starts_ref, ends_ref, out_ref, out_smem):
        warpgroup = lax.axis_index("group")

        def pipeline(body, context, row=0, column=0, first=0, steps=config.stages):
            specs = [
                ((depth, BLOCK), lambda p: (first + p, row)),
                ((depth, columns), lambda p: (first + p, column)),
            ]
            return _pipeline(body, context, config, (steps,), specs)

        buffers = pipeline(_nothing, _nothing).get_allocations(x_ref, dy_ref)

        @functools.partial(pl.run_scoped, buffers=buffers, collective_axes="group")
        def _(buffers):
            @plgpu.nd_loop((E, down * across), collective_axes="core")
            def _(loop):
                expert, tile = loop.index
                row, column = plgpu.planar_snake(tile, (down, across), 1, min(config.snake, across))
                first = lax.div(starts_ref[expert], jnp.int32(depth))
                steps = lax.div(ends_ref[expert], jnp.int32(depth)) - first

                def context(pipe):
                    @functools.partial(pl.run_scoped, acc=plgpu.ACC((ROWS, columns), jnp.float32))
                    def _(acc):
                        pipe(acc)
                        value = acc[...].astype(jnp.bfloat16)
                        target = row * BLOCK + warpgroup * ROWS
                        out = out_ref.at[expert]
                        _store(value, out_smem, out, target, column * columns, config)

                def multiply(_, x_smem, dy_smem, acc):
                    mine = x_smem.transpose((1, 0)).at[pl.ds(warpgroup * ROWS, ROWS)]
                    plgpu.wgmma(acc, mine, dy_smem)
                    plgpu.wgmma_wait(1)
                    return acc

                run = pipeline(multiply, context, row, column, first, steps)
                run(x_ref, dy_ref, allocations=buffers)

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    return _launch(kernel, (E, D, F), config, "grouped_weight_gradient", [x, dy, starts, ends])
