"""Tree attention kernels for TPUs, Pallas: the forward, dQ, and dK with dV.

In the style of splash attention (jax.experimental.pallas.ops.tpu): the grid walks (heads, pairs of
a query block and a key block that meet); the pairs come by scalar prefetch and their number is a
dynamic bound of the grid, so blocks that do not meet cost nothing. Pairs that share a tile of the
result follow each other and add up in VMEM: deterministic. The mask is evaluated only in pairs that
need it.

Arrays are head-major with the rows of the batch end to end: q [N, B * T, H], k and v [K, B * S, H].
Numbers per key are int32 [1, B * S], per query int32 [1, B * T] or float32 [N, 1, B * T]; where a
kernel wants them as a column it turns them over once per tile.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxtrain_kernels.context import Context

LANES = 128
HIDDEN = -0.7 * float(jnp.finfo(jnp.float32).max)  # a score that no query sees; finite: no NaN
FIRST, LAST, MEETS, MASKED = 1, 2, 4, 8
FLAG_BITS = 4


class Pairs(NamedTuple):
    """Which blocks meet, sorted by tile of the result; every tile has at least one entry."""

    count: jax.Array
    """int32 scalar: entries in use."""
    tiles: jax.Array
    """int32 [entries] tile, counted through all rows of the batch."""
    codes: jax.Array
    """int32 [entries] block of the other side, counted alike, << FLAG_BITS, and flags: first and
    last entry of the tile, whether the two meet at all, whether they need the mask."""


class BlockSettings(NamedTuple):
    """Static parameters of the kernels, besides shapes."""

    q_block: int
    k_block: int
    row_blocks: int
    """Query blocks of a row of the batch: visibility counts queries from the row's start."""
    scale: float
    softcap: float | None
    window: int | None


def forward(q, k, v, context: Context, pairs: Pairs, settings: BlockSettings):
    """Output as q and log-sum-exp float32 [N, 1, B * T]: +inf where a query sees nothing.

    `context` has its rows end to end, too; `pairs` lists key blocks for query tiles.
    """
    N, _, H = q.shape
    bq, bk = settings.q_block, settings.k_block
    windowed = settings.window is not None

    def kernel(tiles_ref, codes_ref, q_ref, k_ref, v_ref, since_ref, until_ref, *refs):
        position_ref, key_position_ref, *refs = refs if windowed else (None, None, *refs)
        out_ref, lse_ref, top_ref, total_ref, acc_ref, *column_ref = refs
        entry = pl.program_id(1)
        flags = codes_ref[entry]
        first = lax.rem(tiles_ref[entry], jnp.int32(settings.row_blocks)) * bq

        @pl.when(flags & FIRST != 0)
        def start():
            # HIDDEN is finite: -inf - -inf would be NaN where a query has seen nothing yet.
            top_ref[...] = jnp.full_like(top_ref, HIDDEN)
            total_ref[...] = jnp.zeros_like(total_ref)
            acc_ref[...] = jnp.zeros_like(acc_ref)
            if windowed:
                # Transposed once per tile; a transpose in every step would cost as much as the
                # mask.
                column_ref[0][...] = _column(position_ref[...])

        def step(masked: bool):
            score, _ = _scores(q_ref[...], k_ref[...], settings)
            if masked:
                index = first + lax.broadcasted_iota(jnp.int32, (bq, bk), 0)
                seen = (index >= since_ref[...]) & (index < until_ref[...])
                if windowed:
                    distance = _spread(column_ref[0][...], bk) - key_position_ref[...]
                    seen &= distance < settings.window
                score = jnp.where(seen, score, HIDDEN)
            before = top_ref[...]
            top = jnp.maximum(before, score.max(-1, keepdims=True))
            weight = jnp.exp(score - _spread(top, bk))
            if masked:  # where a query has seen nothing yet, top is HIDDEN and the weight 1
                weight = jnp.where(seen, weight, 0.0)
            decay = jnp.exp(before - top)
            top_ref[...] = top
            total_ref[...] = decay * total_ref[...] + weight.sum(-1, keepdims=True)
            value = _dot(weight.astype(v_ref.dtype), v_ref[...], across=False)
            acc_ref[...] = _spread(decay, H) * acc_ref[...] + value

        _run(flags, step)

        @pl.when(flags & LAST != 0)
        def finish():
            total = total_ref[...]
            empty = total == 0.0
            total = jnp.where(empty, 1.0, total)
            inverse = jnp.where(empty, 0.0, 1.0 / total)
            out_ref[...] = (acc_ref[...] * _spread(inverse, H)).astype(out_ref.dtype)
            lse = jnp.where(empty, jnp.inf, top_ref[...] + jnp.log(total))
            # All lanes are equal; the row layout takes 1/128 of the memory of a column.
            lse_ref[...] = lse.T[:1]

    group = N // k.shape[0]
    return _call(
        kernel,
        "tree_attention_fwd",
        (N, pairs.count),
        pairs,
        [
            (q, _by_tile(bq, H)),
            (k, _by_block(bk, H, group)),
            (v, _by_block(bk, H, group)),
            *_masks(context, _key_row(bk), _tile_row(bq)),
        ],
        [
            (jax.ShapeDtypeStruct(q.shape, q.dtype), _by_tile(bq, H)),
            (jax.ShapeDtypeStruct((N, 1, q.shape[1]), jnp.float32), _by_tile_row(bq)),
        ],
        [
            pltpu.VMEM((bq, LANES), jnp.float32),
            pltpu.VMEM((bq, LANES), jnp.float32),
            pltpu.VMEM((bq, H), jnp.float32),
            *([pltpu.VMEM((bq, LANES), jnp.int32)] if windowed else []),
        ],
    )


def dq(q, k, v, d_out, lse, delta, context, pairs, settings):
    """dQ as q; lse and delta = rowsum(dO O) float32 [N, 1, B * T], the rest as the forward."""
    N, _, H = q.shape
    bq, bk = settings.q_block, settings.k_block
    windowed = settings.window is not None

    def kernel(tiles_ref, codes_ref, q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, *refs):
        since_ref, until_ref, *refs = refs
        position_ref, key_position_ref, *refs = refs if windowed else (None, None, *refs)
        dq_ref, acc_ref, lse_column_ref, delta_column_ref, *column_ref = refs
        entry = pl.program_id(1)
        flags = codes_ref[entry]
        first = lax.rem(tiles_ref[entry], jnp.int32(settings.row_blocks)) * bq

        @pl.when(flags & FIRST != 0)
        def start():
            acc_ref[...] = jnp.zeros_like(acc_ref)
            lse_column_ref[...] = _column(lse_ref[...])
            delta_column_ref[...] = _column(delta_ref[...])
            if windowed:
                column_ref[0][...] = _column(position_ref[...])

        def step(masked: bool):
            score, slope = _scores(q_ref[...], k_ref[...], settings)
            # lse is +inf where a query sees nothing, so its weights are 0.
            weight = jnp.exp(score - _spread(lse_column_ref[...], bk))
            if masked:
                index = first + lax.broadcasted_iota(jnp.int32, (bq, bk), 0)
                seen = (index >= since_ref[...]) & (index < until_ref[...])
                if windowed:
                    distance = _spread(column_ref[0][...], bk) - key_position_ref[...]
                    seen &= distance < settings.window
                weight = jnp.where(seen, weight, 0.0)
            d_weight = _dot(do_ref[...], v_ref[...], across=True)
            d_score = weight * (d_weight - _spread(delta_column_ref[...], bk)) * slope
            # Accumulates in VMEM over all blocks of a tile, in the order of the list:
            # deterministic.
            acc_ref[...] += _dot(d_score.astype(k_ref.dtype), k_ref[...], across=False)

        _run(flags, step)

        @pl.when(flags & LAST != 0)
        def finish():
            dq_ref[...] = acc_ref[...].astype(dq_ref.dtype)

    group = N // k.shape[0]
    (d_q,) = _call(
        kernel,
        "tree_attention_dq",
        (N, pairs.count),
        pairs,
        [
            (q, _by_tile(bq, H)),
            (k, _by_block(bk, H, group)),
            (v, _by_block(bk, H, group)),
            (d_out, _by_tile(bq, H)),
            (lse, _by_tile_row(bq)),
            (delta, _by_tile_row(bq)),
            *_masks(context, _key_row(bk), _tile_row(bq)),
        ],
        [(jax.ShapeDtypeStruct(q.shape, q.dtype), _by_tile(bq, H))],
        [
            pltpu.VMEM((bq, H), jnp.float32),
            pltpu.VMEM((bq, LANES), jnp.float32),
            pltpu.VMEM((bq, LANES), jnp.float32),
            *([pltpu.VMEM((bq, LANES), jnp.int32)] if windowed else []),
        ],
    )
    return d_q


def dkv(q, k, v, d_out, lse, delta, context, pairs, settings):
    """dK and dV as k; `pairs` lists query blocks for key tiles, the rest as `dq`.

    Scores are transposed (rows are keys), so both results are plain products; the query heads of a
    key head are the innermost axis of the grid and add up in VMEM.
    """
    N, _, H = q.shape
    K = k.shape[0]
    group = N // K
    bq, bk = settings.q_block, settings.k_block
    windowed = settings.window is not None

    def kernel(tiles_ref, codes_ref, q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, *refs):
        since_ref, until_ref, *refs = refs
        position_ref, key_position_ref, *refs = refs if windowed else (None, None, *refs)
        dk_ref, dv_ref, dk_acc_ref, dv_acc_ref, since_column_ref, until_column_ref, *refs = refs
        entry, member = pl.program_id(1), pl.program_id(2)
        flags = codes_ref[entry]
        block = lax.shift_right_logical(flags, FLAG_BITS)
        first = lax.rem(block, jnp.int32(settings.row_blocks)) * bq

        # Accumulators live through all query heads of the key head, the innermost grid axis.
        @pl.when((flags & FIRST != 0) & (member == 0))
        def start():
            dk_acc_ref[...] = jnp.zeros_like(dk_acc_ref)
            dv_acc_ref[...] = jnp.zeros_like(dv_acc_ref)
            since_column_ref[...] = _column(since_ref[...])
            until_column_ref[...] = _column(until_ref[...])
            if windowed:
                refs[0][...] = _column(key_position_ref[...])

        def step(masked: bool):
            score, slope = _scores(k_ref[...], q_ref[...], settings)
            weight = jnp.exp(score - lse_ref[...])
            if masked:
                index = first + lax.broadcasted_iota(jnp.int32, (bk, bq), 1)
                seen = index >= _spread(since_column_ref[...], bq)
                seen &= index < _spread(until_column_ref[...], bq)
                if windowed:
                    distance = position_ref[...] - _spread(refs[0][...], bq)
                    seen &= distance < settings.window
                weight = jnp.where(seen, weight, 0.0)
            do = do_ref[...]
            dv_acc_ref[...] += _dot(weight.astype(do.dtype), do, across=False)
            d_weight = _dot(v_ref[...], do, across=True)
            d_score = weight * (d_weight - delta_ref[...]) * slope
            dk_acc_ref[...] += _dot(d_score.astype(q_ref.dtype), q_ref[...], across=False)

        _run(flags, step)

        @pl.when((flags & LAST != 0) & (member == group - 1))
        def finish():
            dk_ref[...] = dk_acc_ref[...].astype(dk_ref.dtype)
            dv_ref[...] = dv_acc_ref[...].astype(dv_ref.dtype)

    by_query = pl.BlockSpec((None, bq, H), lambda h, e, g, t, c: (h * group + g, _block(c, e), 0))
    by_query_row = pl.BlockSpec(
        (None, 1, bq), lambda h, e, g, t, c: (h * group + g, 0, _block(c, e))
    )
    return _call(
        kernel,
        "tree_attention_dkv",
        (K, pairs.count, group),
        pairs,
        [
            (q, by_query),
            (k, _by_tile(bk, H)),
            (v, _by_tile(bk, H)),
            (d_out, by_query),
            (lse, by_query_row),
            (delta, by_query_row),
            *_masks(context, _tile_row(bk), _key_row(bq)),
        ],
        [(jax.ShapeDtypeStruct(k.shape, k.dtype), _by_tile(bk, H))] * 2,
        [
            pltpu.VMEM((bk, H), jnp.float32),
            pltpu.VMEM((bk, H), jnp.float32),
            pltpu.VMEM((bk, LANES), jnp.int32),
            pltpu.VMEM((bk, LANES), jnp.int32),
            *([pltpu.VMEM((bk, LANES), jnp.int32)] if windowed else []),
        ],
    )


def _run(flags, step):
    """Run a step of a pair, with the mask only where it is needed."""
    # A tile that meets no block still has an entry, so that its result is written as zeros.
    pl.when((flags & MEETS != 0) & (flags & MASKED != 0))(lambda: step(True))
    pl.when((flags & MEETS != 0) & (flags & MASKED == 0))(lambda: step(False))


# Operands stay in the inputs' dtype, at the matrix unit's full rate.
def _scores(lhs, rhs, settings):
    """Scaled, capped scores, and their slope: d score / d (lhs . rhs)."""
    score = _dot(lhs, rhs, across=True) * settings.scale
    if settings.softcap is None:
        return score, settings.scale
    squashed = jnp.tanh(score / settings.softcap)
    return settings.softcap * squashed, settings.scale * (1.0 - squashed * squashed)


def _dot(lhs, rhs, across: bool):
    """lhs @ rhs.T (`across`) or lhs @ rhs, accumulated in float32."""
    return lax.dot_general(
        lhs, rhs, (((1,), (1 if across else 0,)), ((), ())), preferred_element_type=jnp.float32
    )


def _spread(column, width):
    """[rows, LANES] of equal lanes -> [rows, width], width a multiple of LANES."""
    # Values are kept with 128 equal lanes, the width of a vector register: tiling is free there.
    return jnp.tile(column, (1, width // LANES))


def _column(row):
    """[1, length] -> [length, LANES] of equal lanes."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T


def _block(codes, entry):
    return lax.shift_right_logical(codes[entry], FLAG_BITS)


def _by_tile(size, H):
    """Index maps take grid indices, then the two prefetched arrays."""
    return pl.BlockSpec((None, size, H), lambda h, e, *a: (h, a[-2][e], 0))


def _by_tile_row(size):
    return pl.BlockSpec((None, 1, size), lambda h, e, *a: (h, 0, a[-2][e]))


def _tile_row(size):
    return pl.BlockSpec((1, size), lambda h, e, *a: (0, a[-2][e]))


def _by_block(size, H, group):
    return pl.BlockSpec(
        (None, size, H), lambda h, e, *a: (lax.div(h, jnp.int32(group)), _block(a[-1], e), 0)
    )


def _key_row(size):
    return pl.BlockSpec((1, size), lambda h, e, *a: (0, _block(a[-1], e)))


def _masks(context, of_keys, of_queries):
    """Return the arrays that define visibility, with their specs; positions only with a window."""
    inputs = [(context.since, of_keys), (context.until, of_keys)]
    inputs += [(context.positions, of_queries), (context.key_positions, of_keys)]
    return [(array, spec) for array, spec in inputs if array is not None]


def _call(kernel, name, grid, pairs, inputs, outputs, scratch):
    arrays, in_specs = zip(*inputs, strict=True)
    out_shape, out_specs = zip(*outputs, strict=True)
    return pl.pallas_call(
        kernel,
        out_shape=out_shape,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=grid,
            in_specs=in_specs,
            out_specs=out_specs,
            scratch_shapes=scratch,
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", *["arbitrary"] * (len(grid) - 1))
        ),
        name=name,
    )(pairs.tiles, pairs.codes, *arrays)
