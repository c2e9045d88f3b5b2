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

from jaxtrain_kernels.mosaic import num_cores, plgpu, swizzle, tanh

LOG2E = math.log2(math.e)
WARPGROUPS = 2
ROWS = 64  # tokens of a warpgroup
TILE_T = WARPGROUPS * ROWS


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of both kernels."""

    tile_v: int = 256
    """Vocabulary rows of a tile."""
    block_d: int = 64
    stages: int = 4
    snake: int = 8
    """Token tiles that are walked before the next vocabulary tile: reuse in the L2 cache."""
    store: int = 64
    """Columns of d_logits stored at a time."""


def _tiles(epilogue, hidden_ref, head_ref, extent, config):
    """Run `epilogue(logits, t_tile, first, start)` for every tile of [T] x [extent] of the head.

    `extent` is (first vocabulary row or a scalar, number of rows): tile j covers rows `start` to
    start + tile_v, and those from `first` on are its own: the last tile overlaps the one before.
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

    buffers = pipeline(nothing, nothing).get_allocations(hidden_ref, head_ref.at[pl.ds(0, tv)])

    @functools.partial(pl.run_scoped, buffers=buffers, collective_axes="group")
    def _(buffers):
        @plgpu.nd_loop((t_tiles * v_tiles,), collective_axes="core")
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
                    epilogue(acc[...], t_tile, offset, shifted)

            def multiply(_, hidden_smem, head_smem, acc):
                mine = hidden_smem.at[pl.ds(group * ROWS, ROWS)]
                plgpu.wgmma(acc, mine, head_smem.transpose((1, 0)))
                plgpu.wgmma_wait(1)
                return acc

            part = pl.ds(pl.multiple_of(base + shifted, 8), tv)
            pipeline(multiply, context, t_tile)(hidden_ref, head_ref.at[part], allocations=buffers)


def _capped(raw, softcap):
    """(softcap * tanh(raw / softcap), tanh(raw / softcap)), or (raw, None)."""
    if softcap is None:
        return raw, None
    t = tanh(raw * (1.0 / softcap))
    return t * softcap, t


def _run(kernel, out_type, scratch, name, arrays):
    run = plgpu.kernel(
        kernel,
        out_type=out_type,
        scratch_types=scratch,
        grid=(num_cores(),),
        grid_names=("core",),
        num_threads=WARPGROUPS + 1,
        thread_name="group",
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    return run(*arrays)


def statistics(hidden, head, targets, temperature, *, softcap: float | None, config: Config):
    """float32 [4, tiles, T] of every vocabulary tile: maximum, sum, moment and target logit.

    hidden [T, D], head [V, D] bfloat16; targets int32 [T]; temperature float32 [T] or None. With
    z the logits after softcap and temperature: m = max z, sum of exp(z - m), sum of
    exp(z - m) (z - m), and z at the target (0 where it is in another tile).
    """
    T, V = hidden.shape[0], head.shape[0]
    tv = config.tile_v
    wgmma = plgpu.Layout.WGMMA
    per_row = wgmma.reduce(1)

    def kernel(hidden_ref, head_ref, target_ref, *refs):
        if temperature is not None:
            temperature_ref, *refs = refs
        out_ref, out_smem = refs
        group = lax.axis_index("group")

        def epilogue(logits, t_tile, first, start):
            rows = pl.ds(t_tile * TILE_T + group * ROWS, ROWS)

            def across(x):
                return lax.broadcast_in_dim(x, (ROWS, tv), [0])

            z, _ = _capped(logits, softcap)
            if temperature is not None:
                tau = plgpu.load(temperature_ref.at[rows], layout=per_row, optimized=False)
                z = z * across(1.0 / tau)
            column = plgpu.broadcasted_iota(jnp.int32, (ROWS, tv), 1, layout=wgmma) + start
            z = lax.cond(start < first, lambda: jnp.where(column >= first, z, -jnp.inf), lambda: z)
            target = plgpu.load(target_ref.at[rows], layout=per_row, optimized=False)
            hit = jnp.where(column == across(target), z, 0.0)
            hit = jnp.where(column >= first, hit, 0.0).sum(axis=1)
            top = z.max(axis=1)
            shifted = z - across(top)
            weight = jnp.exp2(shifted * LOG2E)
            # A column of another tile has weight 0 and z of -inf: their product must be 0.
            moment = (weight * jnp.maximum(shifted, -1e30)).sum(axis=1)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for i, value in enumerate((top, weight.sum(axis=1), moment, hit)):
                out_smem[group, i] = value
            plgpu.commit_smem()
            tile = lax.div(first, jnp.int32(tv))
            for i in range(4):
                plgpu.copy_smem_to_gmem(out_smem.at[group, i], out_ref.at[i, tile, rows])

        _tiles(epilogue, hidden_ref, head_ref, (0, V), config)
        plgpu.wait_smem_to_gmem(0)

    arrays = [hidden, head, targets] + ([] if temperature is None else [temperature])
    return _run(
        kernel,
        jax.ShapeDtypeStruct((4, pl.cdiv(V, tv), T), jnp.float32),
        [plgpu.SMEM((WARPGROUPS, 4, ROWS), jnp.float32)],
        "logp_statistics",
        arrays,
    )


def exponentials(hidden, head, factor, base, *, softcap: float | None, config: Config):
    """(bfloat16 [T, V], float32 [2, tiles, T]): w = 2^(z factor - base), and sums by tile.

    z the logits after softcap; factor and base float32 [T]. With a softcap the first result is
    w (1 - tanh^2), the derivative by the raw logit. The sums are of w and of w log2 w.
    """
    T, V = hidden.shape[0], head.shape[0]
    tv = config.tile_v
    wgmma = plgpu.Layout.WGMMA
    per_row = wgmma.reduce(1)

    def kernel(hidden_ref, head_ref, factor_ref, base_ref, out_ref, sums_ref, out_smem):
        group = lax.axis_index("group")

        def epilogue(logits, t_tile, first, start):
            row = t_tile * TILE_T + group * ROWS
            rows = pl.ds(pl.multiple_of(row, 8), ROWS)

            def of_rows(ref):
                value = plgpu.load(ref.at[rows], layout=per_row, optimized=False)
                return lax.broadcast_in_dim(value, (ROWS, config.store), [0])

            scale, shift = of_rows(factor_ref), of_rows(base_ref)
            total, moment = 0.0, 0.0
            for j in range(tv // config.store):  # in pieces: registers
                column = j * config.store
                z, t = _capped(logits[:, column : column + config.store], softcap)
                power = z * scale - shift
                weight = jnp.exp2(power)
                low = weight if softcap is None else weight * (1.0 - t * t)
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                out_smem[group, j % 2] = low.astype(jnp.bfloat16)
                plgpu.commit_smem()
                columns = pl.ds(pl.multiple_of(start + column, 8), config.store)
                plgpu.copy_smem_to_gmem(out_smem.at[group, j % 2], out_ref.at[rows, columns])
                sums = weight.sum(axis=1), (weight * power).sum(axis=1)
                if V % tv:  # what an overlap repeats counts once; it begins with a piece
                    owned = jnp.where(start + column >= first, 1.0, 0.0)
                    sums = sums[0] * owned, sums[1] * owned
                total, moment = total + sums[0], moment + sums[1]
            tile = lax.div(first, jnp.int32(tv))
            sums_ref[0, tile, rows] = total
            sums_ref[1, tile, rows] = moment

        _tiles(epilogue, hidden_ref, head_ref, (0, V), config)
        plgpu.wait_smem_to_gmem(0)

    shape = (WARPGROUPS, 2, ROWS, config.store)
    return _run(
        kernel,
        [
            jax.ShapeDtypeStruct((T, V), jnp.bfloat16),
            jax.ShapeDtypeStruct((2, pl.cdiv(V, tv), T), jnp.float32),
        ],
        [plgpu.SMEM(shape, jnp.bfloat16, transforms=swizzle(jnp.bfloat16))],
        "logp_exponentials",
        [hidden, head, factor, base],
    )


def d_logits(
    hidden,
    head,
    targets,
    temperature,
    lse,
    entropy,
    cotangents,
    first,
    size: int,
    *,
    softcap: float | None,
    config: Config,
):
    """bfloat16 [T, size]: the gradient of hidden @ head[first : first + size].T.

    lse, entropy and the three cotangents (of logp, entropy, lse) are float32 [T]; `first` int32
    [1], a multiple of 8; the rest as `statistics`.
    """
    T, tv = hidden.shape[0], config.tile_v
    wgmma = plgpu.Layout.WGMMA
    per_row = wgmma.reduce(1)
    per_token = [lse, *cotangents, entropy] + ([] if temperature is None else [temperature])

    def kernel(hidden_ref, head_ref, first_ref, target_ref, *refs):
        per_token_refs, (out_ref, out_smem) = refs[: len(per_token)], refs[len(per_token) :]
        group = lax.axis_index("group")
        base = first_ref[0]

        def epilogue(logits, t_tile, first, start):
            del first  # an overlap is written twice with the same numbers
            row = t_tile * TILE_T + group * ROWS
            rows = pl.ds(row, ROWS)

            def of_rows(ref):
                value = plgpu.load(ref.at[rows], layout=per_row, optimized=False)
                return lax.broadcast_in_dim(value, (ROWS, tv), [0])

            z, t = _capped(logits, softcap)
            if temperature is not None:
                inverse = 1.0 / of_rows(per_token_refs[5])
                z = z * inverse
            lse_ref, logp_ref, entropy_bar_ref, lse_bar_ref, entropy_ref = per_token_refs[:5]
            g_logp = of_rows(logp_ref)
            logp = z - of_rows(lse_ref)
            factor = of_rows(lse_bar_ref) - g_logp
            factor -= of_rows(entropy_bar_ref) * (logp + of_rows(entropy_ref))
            column = plgpu.broadcasted_iota(jnp.int32, (ROWS, tv), 1, layout=wgmma)
            target = of_rows(target_ref) - (base + start)
            dz = jnp.exp2(logp * LOG2E) * factor + jnp.where(column == target, g_logp, 0.0)
            if temperature is not None:
                dz *= inverse
            if softcap is not None:
                dz *= 1.0 - t * t
            dz = dz.astype(jnp.bfloat16)
            for j in range(tv // config.store):
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                out_smem[group, j % 2] = dz[:, j * config.store : (j + 1) * config.store]
                plgpu.commit_smem()
                columns = pl.ds(pl.multiple_of(start + j * config.store, 8), config.store)
                plgpu.copy_smem_to_gmem(
                    out_smem.at[group, j % 2],
                    out_ref.at[pl.ds(pl.multiple_of(row, 8), ROWS), columns],
                )

        _tiles(epilogue, hidden_ref, head_ref, (base, size), config)
        plgpu.wait_smem_to_gmem(0)

    shape = (WARPGROUPS, 2, ROWS, config.store)
    return _run(
        kernel,
        jax.ShapeDtypeStruct((T, size), jnp.bfloat16),
        [plgpu.SMEM(shape, jnp.bfloat16, transforms=swizzle(jnp.bfloat16))],
        "logp_d_logits",
        [hidden, head, first, targets, *per_token],
    )
