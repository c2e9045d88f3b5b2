"""logp_gather's matmuls with their epilogues for Hopper, Pallas Mosaic GPU.

Persistent thread blocks compute 128 x 256 tiles of hidden @ head.T (tokens x vocabulary) in
registers and never write logits. `statistics` reduces each tile to four numbers per token;
`d_logits` turns each into the gradient of the logits in bfloat16, for a chunk of the vocabulary,
which the caller multiplies with the head and the hidden states at the full rate of cuBLAS.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxtrain_kernels.mosaic import launch, num_cores, plgpu, swizzle, tanh

LOG2E = math.log2(math.e)
WARPGROUPS = 2  # that compute
ROWS = 64  # tokens of a warpgroup: the rows of a wgmma
TILE_T = WARPGROUPS * ROWS


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of both kernels."""

    tile_v: int = 256
    """Vocabulary rows of a tile."""
    block_d: int = 64
    """Of the width, in one step: 128 bytes of bfloat16, as wide as a swizzled row can be."""
    stages: int = 4
    snake: int = 8
    """Token tiles that are walked before the next vocabulary tile: reuse in the L2 cache."""
    store: int = 64
    """Columns of d_logits stored at a time."""


def _tiles(epilogue, hidden_ref, head_ref, extent, config, active=True):
    """Run `epilogue(logits, t_tile, first, start)` for every tile of [T] x [extent] of the head.

    `extent` is (first vocabulary row or a scalar, number of rows): tile j covers rows `start` to
    start + tile_v, and those from `first` on are its own: the last tile overlaps the one before.
    Nothing runs unless `active` (a bool of the device).
    """
    T, D = hidden_ref.shape
    base, rows = extent
    tv, bd = config.tile_v, config.block_d
    t_tiles, v_tiles = T // TILE_T, pl.cdiv(rows, tv)
    group = lax.axis_index("group")

    def pipeline(body, context, t_tile=0):
        spec = functools.partial(
            plgpu.BlockSpec, transforms=swizzle(jnp.bfloat16), memory_space=plgpu.SMEM
        )
        return plgpu.emit_pipeline_warp_specialized(
            body,
            grid=(D // bd,),
            in_specs=[
                # The last product may still read its stage when the next one starts: `multiply`
                # leaves one in flight, so a stage is given back one step late.
                spec((TILE_T, bd), lambda d: (t_tile, d), delay_release=1),
                spec((tv, bd), lambda d: (0, d), delay_release=1),
            ],
            memory_registers=40,
            wg_axis="group",
            num_compute_wgs=WARPGROUPS,
            max_concurrent_steps=config.stages,
            compute_context=context,
        )

    def nothing(*_, **__):
        return None

    # The pipelines of all tiles use the same buffers; this one only says which it would allocate.
    buffers = pipeline(nothing, nothing).get_allocations(hidden_ref, head_ref.at[pl.ds(0, tv)])

    # Products that have read their last stage. The pipeline itself does not wait for the stage that
    # is given back late: the next tile's first blocks would overwrite it under the product.
    barrier = plgpu.Barrier(num_arrivals=WARPGROUPS)

    @functools.partial(pl.run_scoped, buffers=buffers, read=barrier, collective_axes="group")
    def _(buffers, read):
        count = t_tiles * v_tiles
        count = count if active is True else jnp.where(active, count, 0)

        @plgpu.nd_loop((count,), collective_axes="core")
        def _(loop):
            t_tile, v_tile = plgpu.planar_snake(
                loop.index[0], (t_tiles, v_tiles), 0, min(config.snake, t_tiles)
            )
            offset = v_tile * tv
            shifted = lax.min(offset, jnp.int32(rows - tv))

            def context(pipe):
                @functools.partial(pl.run_scoped, acc=plgpu.ACC((ROWS, tv), jnp.float32))
                def _(acc):
                    pipe(acc)
                    logits = acc[...]  # waits for the last product
                    plgpu.barrier_arrive(read)
                    epilogue(logits, t_tile, offset, shifted)

            def multiply(_, hidden_smem, head_smem, acc):
                local = hidden_smem.at[pl.ds(group * ROWS, ROWS)]
                plgpu.wgmma(acc, local, head_smem.transpose((1, 0)))
                plgpu.wgmma_wait(1)
                return acc

            part = pl.ds(pl.multiple_of(base + shifted, 8), tv)
            pipeline(multiply, context, t_tile)(hidden_ref, head_ref.at[part], allocations=buffers)

            @pl.when(group == WARPGROUPS)
            def _():
                plgpu.barrier_wait(read)


def _capped(raw, softcap):
    """(softcap * tanh(raw / softcap), tanh(raw / softcap)), or (raw, None)."""
    if softcap is None:
        return raw, None
    t = tanh(raw * (1.0 / softcap))
    return t * softcap, t


def _run(kernel, out_type, scratch, name, arrays):
    grid = {"core": num_cores()}
    return launch(kernel, name, out_type, scratch, arrays, grid=grid, warpgroups=WARPGROUPS)


def _row_reader(rows, width):
    """Reads float32 [T] at `rows` and spreads it over `width` columns."""

    def read(ref):
        value = plgpu.load(ref.at[rows], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
        return lax.broadcast_in_dim(value, (ROWS, width), [0])

    return read


def _storer(out_ref, out_smem, group, rows, config):
    """Stores pieces of a tile, each to shared memory and on by TMA; two are under way."""

    def store(piece, column, value):
        # Of the copies under way only the latest may be unread: its buffer is the other one.
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        out_smem[group, piece % 2] = value.astype(jnp.bfloat16)
        plgpu.commit_smem()
        columns = pl.ds(pl.multiple_of(column, 8), config.store)
        plgpu.copy_smem_to_gmem(out_smem.at[group, piece % 2], out_ref.at[rows, columns])

    return store


def _store_smem(config):
    return plgpu.SMEM(
        (WARPGROUPS, 2, ROWS, config.store), jnp.bfloat16, transforms=swizzle(jnp.bfloat16)
    )


def _rows_of(t_tile):
    start = t_tile * TILE_T + lax.axis_index("group") * ROWS
    return pl.ds(pl.multiple_of(start, 8), ROWS)


def statistics(hidden, head, factor, *, softcap: float | None, config: Config, active=None):
    """float32 [3, tiles, T] of every vocabulary tile: maximum m, sum of w, sum of w log2 w.

    hidden [T, D], head [V, D] bfloat16; factor float32 [T], positive. With z the logits after
    softcap, w = 2^(z factor - m). With `active` (int32 [1]) the result means nothing, and takes
    hardly any time, where that is 0.
    """
    T, V = hidden.shape[0], head.shape[0]
    tv, width = config.tile_v, config.store

    def kernel(hidden_ref, head_ref, factor_ref, active_ref, out_ref, out_smem):
        runs = True if active_ref is None else active_ref[0] != 0
        group = lax.axis_index("group")

        def epilogue(logits, t_tile, first, start):
            rows = _rows_of(t_tile)
            z, _ = _capped(logits, softcap)
            factor = plgpu.load(
                factor_ref.at[rows], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False
            )
            # What an overlap repeats may set the maximum: it is one of the row's logits.
            top = z.max(axis=1) * factor
            scale, shift = (lax.broadcast_in_dim(x, (ROWS, width), [0]) for x in (factor, top))
            total, moment = 0.0, 0.0
            for column in range(0, tv, width):
                power = z[:, column : column + width] * scale - shift
                power = jnp.maximum(power, -150.0)  # 2^-150 is 0: no 0 * -inf
                weight = jnp.exp2(power)
                sums = weight.sum(axis=1), (weight * power).sum(axis=1)
                if V % tv:  # an overlap begins with a piece, and counts once
                    owned = jnp.where(start + column >= first, 1.0, 0.0)
                    sums = sums[0] * owned, sums[1] * owned
                total, moment = total + sums[0], moment + sums[1]
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the buffer's numbers of a tile before
            for i, value in enumerate((top, total, moment)):
                out_smem[group, i] = value
            plgpu.commit_smem()
            tile = lax.div(first, jnp.int32(tv))
            for i in range(3):
                plgpu.copy_smem_to_gmem(out_smem.at[group, i], out_ref.at[i, tile, rows])

        _tiles(epilogue, hidden_ref, head_ref, (0, V), config, runs)
        plgpu.wait_smem_to_gmem(0)

    return _run(
        kernel,
        jax.ShapeDtypeStruct((3, pl.cdiv(V, tv), T), jnp.float32),
        [plgpu.SMEM((WARPGROUPS, 3, ROWS), jnp.float32)],
        "logp_statistics",
        [hidden, head, factor, active],
    )


def merge(top, total, moment):
    """(log-sum-exp, entropy) [T] of rows from parts [P, T] as `statistics` describes them."""
    highest = top.max(0)
    shift = top - highest[None]
    decay = jnp.exp2(shift)
    moment = ((moment + total * shift) * decay).sum(0)
    total = (total * decay).sum(0)
    log_total = jnp.log2(total)
    return (highest + log_total) / LOG2E, (log_total - moment / total) / LOG2E


def exponentials(
    hidden, head, factor, base, *, softcap: float | None, config: Config, active=None, into=None
):
    """(bfloat16 [T, V], float32 [2 or 3, tiles, T]): w = 2^(z factor - base), its sums by tile.

    z the logits after softcap; factor and base float32 [T]. With a softcap the first result is
    w (1 - tanh^2), the derivative by the raw logit, and there are three: the sums of w and of
    w log2 w, and the largest raw logit, for the first result does not tell the largest w then. With
    `active` (int32 [1]) and a Ref `into`, w is written there, or nothing where that is 0.
    """
    T, V = hidden.shape[0], head.shape[0]
    tv, width = config.tile_v, config.store

    def kernel(hidden_ref, head_ref, factor_ref, base_ref, active_ref, into_ref, *refs):
        *out_refs, sums_ref, out_smem = refs
        out_ref = out_refs[0] if into_ref is None else into_ref
        runs = True if active_ref is None else active_ref[0] != 0
        group = lax.axis_index("group")

        def epilogue(logits, t_tile, first, start):
            rows = _rows_of(t_tile)
            of_rows = _row_reader(rows, width)
            store = _storer(out_ref, out_smem, group, rows, config)
            scale, shift = of_rows(factor_ref), of_rows(base_ref)
            tile = lax.div(first, jnp.int32(tv))
            if softcap is not None:
                sums_ref[2, tile, rows] = logits.max(axis=1)
            total, moment = 0.0, 0.0
            for piece, column in enumerate(range(0, tv, width)):  # in pieces: registers
                z, t = _capped(logits[:, column : column + width], softcap)
                power = z * scale - shift
                weight = jnp.exp2(power)
                store(piece, start + column, weight if t is None else weight * (1.0 - t * t))
                sums = weight.sum(axis=1), (weight * power).sum(axis=1)
                if V % tv:  # an overlap begins with a piece, and counts once
                    owned = jnp.where(start + column >= first, 1.0, 0.0)
                    sums = sums[0] * owned, sums[1] * owned
                total, moment = total + sums[0], moment + sums[1]
            sums_ref[0, tile, rows] = total
            sums_ref[1, tile, rows] = moment

        _tiles(epilogue, hidden_ref, head_ref, (0, V), config, runs)
        plgpu.wait_smem_to_gmem(0)

    w_TV = jax.ShapeDtypeStruct((T, V), jnp.bfloat16)
    planes = 2 if softcap is None else 3
    sums = jax.ShapeDtypeStruct((planes, pl.cdiv(V, tv), T), jnp.float32)
    outputs = _run(
        kernel,
        [w_TV, sums] if into is None else [sums],
        [_store_smem(config)],
        "logp_exponentials",
        [hidden, head, factor, base, active, into],
    )
    return tuple(outputs) if into is None else outputs[0]


def d_logits(
    hidden, head, factor, base, slopes, first, size: int, *, softcap: float | None, config: Config
):
    """bfloat16 [T, size]: w (a - b log2 w) with w = 2^(z factor - base), for a chunk of logits.

    z are the logits of hidden @ head[first : first + size].T after softcap, and with one the result
    is multiplied by its derivative; factor, base and slopes = (a, b) float32 [T]; `first` int32
    [1], a multiple of 8. That is the gradient of whatever depends on a row's softmax alone.
    """
    T, tv, width = hidden.shape[0], config.tile_v, config.store

    def kernel(
        hidden_ref, head_ref, first_ref, factor_ref, base_ref, slope_refs, out_ref, out_smem
    ):
        group = lax.axis_index("group")
        base_row = first_ref[0]

        def epilogue(logits, t_tile, first, start):
            del first  # an overlap is written twice with the same numbers
            rows = _rows_of(t_tile)
            of_rows = _row_reader(rows, width)
            store = _storer(out_ref, out_smem, group, rows, config)
            scale, shift, a, b = (of_rows(r) for r in (factor_ref, base_ref, *slope_refs))
            for piece, column in enumerate(range(0, tv, width)):
                z, t = _capped(logits[:, column : column + width], softcap)
                power = z * scale - shift
                dz = jnp.exp2(power) * (a - b * power)
                store(piece, start + column, dz if t is None else dz * (1.0 - t * t))

        _tiles(epilogue, hidden_ref, head_ref, (base_row, size), config)
        plgpu.wait_smem_to_gmem(0)

    return _run(
        kernel,
        jax.ShapeDtypeStruct((T, size), jnp.bfloat16),
        [_store_smem(config)],
        "logp_d_logits",
        [hidden, head, first, factor, base, slopes],
    )
