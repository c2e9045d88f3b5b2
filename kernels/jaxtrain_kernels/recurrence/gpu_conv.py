"""The gradient of a convolution along branches (Pallas, Triton; any NVIDIA GPU).

dx_s = sum over j < W of w[W - 1 - j] * sum of dy_t over the tokens t whose j-th before is s. XLA
scatters W - 1 arrays for it, one after the other, with atomics. Here a program owns some tokens and
columns of dx: it reads dy at its tokens and right behind them, where their branch goes on, and adds
its jumps (hops.py) one by one in their order. Every number is read from memory once, and sums have
one order.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jaxtrain_kernels.recurrence.hops import TILE, Hops, find_hops
from jaxtrain_kernels.triton import plt, require_nvidia

COLUMNS = 128
WARPS = 8
FEW = 256
"""Tokens of a row: below, XLA's scatters cost no more than launches."""
DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)


def hops_of(prev, taps: int) -> Hops | None:
    """`find_hops`, where kernels take rows like these; None elsewhere."""
    try:
        require_nvidia()
    except NotImplementedError:
        return None
    return None if prev is None or prev.shape[1] < FEW else find_hops(prev, taps)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def convolve(interpret: bool, x, w, hops: Hops):
    """sum over j < W of w[:, W - 1 - j] * x[the j-th token before], [B, T, F], in float32; of x
    in at most float32. The gradient of x is made by `transposed`."""
    return sum(
        term * w[None, None, :, w.shape[1] - 1 - j].astype(jnp.float32)
        for j, term in enumerate(_reads(x, hops))
    )


def _reads(x, hops: Hops):
    """x of the tokens 0, 1, .. before, float32; 0 where there is none."""
    yield x.astype(jnp.float32)
    longer = jnp.pad(x, ((0, 0), (0, 1), (0, 0)))  # -1 is the place behind the row
    for j in range(hops.back.shape[1]):
        token = hops.back[:, j] % longer.shape[1]
        yield jnp.take_along_axis(longer, token[..., None], axis=1).astype(jnp.float32)


def _convolve_fwd(interpret, x, w, hops):
    return convolve(interpret, x, w, hops), (x, w, hops)


def _convolve_bwd(interpret, residuals, dy):
    x, w, hops = residuals
    sums = [(dy * read).sum((0, 1)) for read in _reads(x, hops)]
    dx = transposed(dy.astype(x.dtype), w, hops, interpret=interpret)
    return dx, jnp.stack(sums[::-1], axis=1).astype(w.dtype), None


convolve.defvjp(_convolve_fwd, _convolve_bwd)


@functools.partial(jax.jit, static_argnames=("interpret",))
def transposed(dy, w, hops: Hops, *, interpret: bool = False):
    """dx [B, T, F] in dy's dtype, of dy [B, T, F] and w [F, W]; sums in float32."""
    B, T, F = dy.shape
    taps = w.shape[1]
    grid = (pl.cdiv(F, COLUMNS), pl.cdiv(T, TILE), B)
    return pl.pallas_call(
        functools.partial(_transposed, taps=taps),
        grid=grid,
        out_shape=jax.ShapeDtypeStruct(dy.shape, dy.dtype),
        compiler_params=plt.CompilerParams(num_warps=WARPS, num_stages=1),
        interpret=interpret,
        name="causal_conv_back",
    )(hops.back, hops.target, hops.source, hops.first, w.astype(jnp.float32).T, dy)


def _transposed(back_ref, target_ref, source_ref, first_ref, w_ref, dy_ref, dx_ref, *, taps: int):
    block, tile, row = (pl.program_id(axis) for axis in range(3))
    T, F = dy_ref.shape[1:]
    token_S = tile * TILE + jnp.arange(TILE, dtype=jnp.int32)
    column_C = block * COLUMNS + jnp.arange(COLUMNS, dtype=jnp.int32)
    inside_C = column_C < F
    spread_rows = functools.partial(spread, column_C=column_C, inside_C=inside_C)

    def weights(j):
        return plt.load(w_ref.at[taps - 1 - j, column_C], mask=inside_C, other=0.0)

    index, mask = spread_rows(token_S, token_S < T)
    total_SC = _read(dy_ref, row, index, mask) * weights(0)[None]
    for j in range(1, taps):
        behind_S = token_S + j
        there_S = behind_S < T
        # The token j behind reads this one only if their branch continues in the row.
        reads_S = plt.load(back_ref.at[row, j - 1, behind_S], mask=there_S, other=-1)
        index, mask = spread_rows(behind_S, there_S & (reads_S == token_S))
        total_SC += _read(dy_ref, row, index, mask) * weights(j)[None]

    def jump(i, total_SC):
        token, code = target_ref[row, i], source_ref[row, i]
        # The source encodes the reading token and its distance.
        j = code % (taps - 1) + 1
        line = dy_ref.at[row, code // (taps - 1), column_C]
        line_C = plt.load(line, mask=inside_C, other=0.0).astype(jnp.float32) * weights(j)
        return total_SC + jnp.where((token_S == token)[:, None], line_C[None], 0.0)

    # One after the other in their sorted order: a fixed order of sums.
    total_SC = jax.lax.fori_loop(first_ref[row, tile], first_ref[row, tile + 1], jump, total_SC)
    index, mask = spread_rows(token_S, token_S < T)
    plt.store(dx_ref.at[row, *index], total_SC.astype(dx_ref.dtype), mask=mask)


def spread(token_S, there_S, *, column_C, inside_C):
    """((tokens, columns), mask) of a tile, each [S, C]."""
    shape = (len(token_S), len(column_C))
    index = (jnp.broadcast_to(token_S[:, None], shape), jnp.broadcast_to(column_C[None], shape))
    return index, there_S[:, None] & inside_C[None]


def _read(ref, row, index, mask):
    return plt.load(ref.at[row, *index], mask=mask, other=0.0).astype(jnp.float32)
