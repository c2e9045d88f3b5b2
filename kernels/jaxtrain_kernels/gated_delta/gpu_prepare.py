"""T and P of each chunk, which the walk needs and which need no state: Hopper, Pallas Mosaic GPU.

T = (I + A)^-1 grows by joining diagonal blocks of 1, 2, 4 .. 32: with L the part of A between the
halves of each pair, X - X L X is the inverse of the pairs. Powers of A itself overflow where keys
repeat. The products are of three bfloat16 ones, of each side's leading and following 8 bits: to
2^-16 of a factor, far below the rounding of T at the end.

A warpgroup does one chunk of one value head; several share a multiprocessor and hide each other's
waits.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxtrain_kernels.gated_delta.gpu_windows import TILE, C, Chunked, Links, own_rows, window_of
from jaxtrain_kernels.mosaic import plgpu, swizzled


class Scratch(NamedTuple):
    """Shared memory of a thread block, and its barrier."""

    q: jax.Ref
    """[C, K], and k the same."""
    k: jax.Ref
    high: jax.Ref
    """[C, C]: the leading bits of a right side, at the end T; `low` the following ones."""
    low: jax.Ref
    P: jax.Ref
    zeros: jax.Ref
    """[TILE, K]."""
    ready: jax.Ref


def prepare(
    chunked: Chunked, links: Links, blank: tuple[tuple[int, ...], ...] = ()
) -> tuple[jax.Array, ...]:
    """T and P [B, n, N, C, C] in q's dtype, not written where a row has no such chunk; rows of P
    that are not its own tokens are 0. Behind them arrays [B, T, H or N, K] of the shapes `blank`
    in that dtype, which are 0 in the tiles of `links.blank` and not written elsewhere."""
    B, _, H, K = chunked.q.shape
    n, N = chunked.G.shape[1:3]
    dtype, f32 = chunked.q.dtype, jnp.float32

    def kernel(links, q, k, beta, G, T_out, P_out, *refs):
        *targets, smem = refs
        program = lax.axis_index("program")
        head = lax.rem(program, jnp.int32(N))
        c = lax.rem(lax.div(program, jnp.int32(N)), jnp.int32(n))
        row = lax.div(program, jnp.int32(N * n))

        def clear():
            blocks = links.blank.shape[1]
            bits = jnp.where(c < blocks, links.blank[row, lax.min(c, jnp.int32(blocks - 1))], 0)

            @pl.when(bits > 0)
            def _():
                smem.zeros[...] = jnp.zeros((TILE, K), dtype)
                plgpu.commit_smem()

                @pl.loop(0, C // TILE)
                def _(i):
                    tile = pl.ds(pl.multiple_of(c * C + i * TILE, TILE), TILE)
                    is_blank = (lax.shift_right_logical(bits, i) & 1) > 0
                    for target in targets:
                        heads_per_target = jnp.int32(N // target.shape[2])
                        tile_ref = target.at[row, tile, lax.div(head, heads_per_target)]
                        copy = functools.partial(plgpu.copy_smem_to_gmem, smem.zeros, tile_ref)
                        pl.when(is_blank & (lax.rem(head, heads_per_target) == 0))(copy)

        if targets:
            clear()

        @pl.when(c < links.total[row])
        def _():
            window = window_of(links, row, c)
            key_head = lax.div(head, jnp.int32(N // H))
            plgpu.copy_gmem_to_smem(k.at[row, window, key_head], smem.k, smem.ready)
            plgpu.copy_gmem_to_smem(q.at[row, window, key_head], smem.q, smem.ready)

            wgmma, square = plgpu.Layout.WGMMA, plgpu.ACC((C, C), f32)

            def laid(x):
                return plgpu.layout_cast(x, wgmma)

            def spread(ref, axis):
                """Numbers of tokens as rows (0) or columns (1)."""
                layout = wgmma.reduce(1 - axis)
                x = plgpu.load(ref.at[row, c, head], layout=layout, optimized=False)
                return laid(lax.broadcast_in_dim(x, (C, C), [axis]))

            def split(x):
                high = laid(x.astype(dtype))
                return high, laid((x - laid(high.astype(f32))).astype(dtype))

            def multiply(acc, split_X):
                plgpu.wgmma(acc, split_X[0], smem.high)
                plgpu.wgmma(acc, split_X[0], smem.low)
                plgpu.wgmma(acc, split_X[1], smem.high)

            def hold(parts):
                smem.high[...], smem.low[...] = parts
                plgpu.commit_smem()

            i, j = (plgpu.broadcasted_iota(jnp.int32, (C, C), d, layout=wgmma) for d in (0, 1))
            apart = spread(G, 0) - spread(G, 1)
            # Masked before exp: above the diagonal `apart` is positive and would overflow.
            D = laid(jnp.exp(jnp.where(i >= j, apart, -jnp.inf)))
            by_row = spread(beta, 0)
            plgpu.barrier_wait(smem.ready)

            def pairs(kk, qk):
                plgpu.wgmma(kk, smem.k, smem.k.transpose((1, 0)))
                plgpu.wgmma(qk, smem.q, smem.k.transpose((1, 0)))
                return laid(kk[...]), laid(qk[...])

            kk, qk = pl.run_scoped(pairs, square, square)
            P = jnp.where(own_rows(links, row, c)(i), laid(qk * D), 0.0)
            smem.P[...] = laid(P.astype(dtype))
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(smem.P, P_out.at[row, c, head])

            A = laid(jnp.where(i > j, laid(by_row * kk * D), 0.0))
            # i ^ j in [size, 2 size) holds for the blocks of A between the halves of each pair of
            # `size`.
            distance = i ^ j
            X = laid(jnp.where(i == j, 1.0, jnp.where(distance == 1, -A, 0.0)))
            size = 2
            while size < C:
                between = (distance >= size) & (distance < 2 * size)
                L = split(laid(jnp.where(between, -A, 0.0)))
                split_X = split(X)
                hold(split_X)

                def first(acc, L=L):
                    multiply(acc, L)
                    return laid(acc[...])

                hold(split(pl.run_scoped(first, square)))

                def second(acc, split_X=split_X):
                    multiply(acc, split_X)

                X = laid(pl.run_state(second)(plgpu.ACC.init(X)))
                size *= 2
            smem.high[...] = laid(X.astype(dtype))
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(smem.high, T_out.at[row, c, head])

        plgpu.wait_smem_to_gmem(0)

    square = swizzled((C, C), dtype)
    scratch = Scratch(
        q=swizzled((C, K), dtype),
        k=swizzled((C, K), dtype),
        high=square,
        low=square,
        P=square,
        zeros=plgpu.SMEM((TILE, K), dtype),
        ready=plgpu.Barrier(num_arrivals=2),
    )
    out = jax.ShapeDtypeStruct((B, n, N, C, C), dtype)
    run = plgpu.kernel(
        kernel,
        out_type=[out, out, *(jax.ShapeDtypeStruct(shape, dtype) for shape in blank)],
        scratch_types=[scratch],
        grid=(B * n * N,),
        grid_names=("program",),
        kernel_name="gated_delta_prepare",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )
    return tuple(run(links, chunked.q, chunked.k, chunked.beta, chunked.G))
