"""The gradient of the state through the chunks of a list, last to first: Hopper, Pallas Mosaic GPU.

With dS owed to the state behind a chunk (letters in chunk.py):

    dv' = P^T do + e^(G_C - G) (k dS);  dx = T^T dv'
    dS before = e^(G_C) dS + q^T (e^G do) - k^T (beta e^G dx)

A warpgroup owns 64 columns of V of one value head of one list, and shares nothing. It holds dS
transposed, [64, K] in float32 registers: then dS, dv' and dx are each the left operand of the next
product, which wgmma takes from registers, and nothing of the chain goes through shared memory.
do is transposed by a product with the identity, which is exact.

What branches owe to a state that waits in a slot is summed in float32 in global memory, by the
thread that reads it later; a register says which slots hold something. One warpgroup walks a list,
so sums are always of the same order.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxtrain_kernels.gated_delta.gpu_windows import C as CHUNK
from jaxtrain_kernels.gated_delta.gpu_windows import Chunked, Links, own_rows, window_of
from jaxtrain_kernels.mosaic import launch, opaque, plgpu, swizzled
from jaxtrain_kernels.recurrence.chunks import NEIGHBOR, ROOT

ROWS = 64  # columns of V of a warpgroup: the rows of a wgmma
STARTS = 1 << 30  # the bit of the states before the roots, among those of slots


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of the kernel."""

    stages: int = 3
    """Chunks in flight."""
    compute_registers: int = 240
    memory_registers: int = 24


class Scratch(NamedTuple):
    """Shared memory of a thread block, and its barriers."""

    q: jax.Ref
    """[stages, C, K]: a ring, as k, d_out, T, P, beta and G."""
    k: jax.Ref
    d_out: jax.Ref
    """[stages, C, ROWS]."""
    T: jax.Ref
    P: jax.Ref
    beta: jax.Ref
    G: jax.Ref
    d_x: jax.Ref
    """[ROWS, C], and d_S [ROWS, K]: on their way out."""
    d_S: jax.Ref
    identity: jax.Ref
    ready: jax.Ref
    free: jax.Ref


def make_scratch(key_dim: int, dtype, stages: int) -> Scratch:
    keys = swizzled((stages, CHUNK, key_dim), dtype)
    square = swizzled((stages, CHUNK, CHUNK), dtype)
    per_token = plgpu.SMEM((stages, CHUNK), jnp.float32)
    return Scratch(
        q=keys,
        k=keys,
        d_out=swizzled((stages, CHUNK, ROWS), dtype),
        T=square,
        P=square,
        beta=per_token,
        G=per_token,
        d_x=swizzled((ROWS, CHUNK), dtype),
        d_S=swizzled((ROWS, key_dim), dtype),
        identity=swizzled((CHUNK, CHUNK), dtype),
        ready=plgpu.Barrier(num_barriers=stages, num_arrivals=7),  # one for each copy
        free=plgpu.Barrier(num_barriers=stages),
    )


def walk_back(
    links: Links,
    chunked: Chunked,
    d_out: jax.Array,
    d_last: jax.Array | None,
    slots: int,
    config: Config = Config(),
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(dx [B, n, N, V, C], dS behind each chunk [B, n, N, V, K], both transposed and in q's dtype;
    what is owed to the states before the roots of each list, summed, float32 [L, N, K, V]).

    d_out [B, T, N, V]; d_last float32 [L, N, K, V] or None:
    owed to the state behind the last chunk of each list. Chunks of no list are left out, and the
    sum of a list without chunks is not defined.
    """
    B, _, H, K = chunked.q.shape
    N, V = chunked.v.shape[2:]
    L, n, parts = len(links.count), chunked.G.shape[1], V // ROWS
    dtype = chunked.q.dtype
    stages = config.stages
    if d_last is not None:
        d_last = d_last.swapaxes(2, 3)
    f32 = jnp.float32

    def kernel(links, chunked, d_out, d_last, d_x_out, d_S_out, d_state, stored, smem: Scratch):
        program = lax.axis_index("program")
        part = lax.rem(program, jnp.int32(parts))
        head = lax.rem(lax.div(program, jnp.int32(parts)), jnp.int32(N))
        lane = lax.div(program, jnp.int32(parts * N))
        columns = pl.ds(pl.multiple_of(part * ROWS, ROWS), ROWS)
        row, first, count = links.row[lane], links.first[lane], links.count[lane]
        end = first + count - 1

        @pl.when(lax.axis_index("group") == 0)
        def compute():
            plgpu.set_max_registers(config.compute_registers, action="increase")
            wgmma = plgpu.Layout.WGMMA
            square = (ROWS, CHUNK)
            i, j = (
                plgpu.broadcasted_iota(jnp.int32, square, axis, layout=wgmma) for axis in (0, 1)
            )
            smem.identity[...] = jnp.where(i == j, 1.0, 0.0).astype(dtype)
            plgpu.commit_smem()

            def read(ref):
                return plgpu.load(ref, layout=wgmma, optimized=False)

            def zeros():
                return plgpu.layout_cast(jnp.zeros((ROWS, K), f32), wgmma)

            def per_column(x):
                return lax.broadcast_in_dim(x, square, [1])

            column = plgpu.broadcasted_iota(jnp.int32, (CHUNK,), 0, layout=wgmma.reduce(0))

            def link(c):
                c = lax.max(c, first)
                return links.source[row, c], links.keep[row, c]

            def bit_of(slot):
                return lax.shift_left(jnp.int32(1), lax.clamp(0, slot, 29))

            def step(i, carry):
                d_S, filled, source, keep = carry
                c, slot = end - i, lax.rem(i, jnp.int32(stages))
                following = link(c - 1)
                waits = keep < slots
                filled = jnp.where(waits, filled & ~bit_of(keep), filled)
                d_S = lax.cond(
                    waits,
                    lambda: d_S + read(stored.at[lane, lax.min(keep, slots - 1), head, columns]),
                    lambda: d_S,
                )
                plgpu.barrier_wait(smem.ready.at[slot])
                low_S, do = d_S.astype(dtype), smem.d_out.at[slot].transpose((1, 0))
                last = smem.G[slot, CHUNK - 1]
                # Before anything is queued: ptxas would wait for all of it.
                decayed = d_S * jnp.exp(last)

                def go_through(seen, row_factor, turned):
                    # wgmma runs behind the instructions, in the order of its queue.
                    plgpu.wgmma(seen, low_S, smem.k.at[slot].transpose((1, 0)))
                    plgpu.wgmma(row_factor, do, smem.P.at[slot])
                    plgpu.wgmma(turned, do, smem.identity)
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the chunk before
                    smem.d_S[...] = low_S
                    G = plgpu.load(smem.G.at[slot], layout=wgmma.reduce(0))
                    rest = jnp.exp(last - G)
                    # Of others' gradients of o nothing counts.
                    eG = jnp.where(own_rows(links, opaque(row), c)(column), jnp.exp(G), 0.0)
                    seen, row_factor = (
                        plgpu.wgmma_accumulator_load(x, wait_n=1) for x in (seen, row_factor)
                    )
                    low_new = (row_factor + seen * per_column(rest)).astype(dtype)

                    def add(d_S):
                        def of_x(ref):
                            plgpu.wgmma(ref, low_new, smem.T.at[slot])
                            do = plgpu.wgmma_accumulator_load(turned, wait_n=1)
                            low_do = (do * per_column(eG)).astype(dtype)
                            plgpu.wgmma(d_S, low_do, smem.q.at[slot])
                            return plgpu.wgmma_accumulator_load(ref, wait_n=1)

                        d_x = pl.run_scoped(of_x, plgpu.ACC(square, f32))
                        beta = plgpu.load(smem.beta.at[slot], layout=wgmma.reduce(0))
                        pull = (d_x * per_column(-beta * eG)).astype(dtype)
                        plgpu.wgmma(d_S, pull, smem.k.at[slot])
                        smem.d_x[...] = d_x.astype(dtype)
                        plgpu.commit_smem()
                        plgpu.copy_smem_to_gmem(smem.d_x, d_x_out.at[row, c, head, columns])
                        plgpu.copy_smem_to_gmem(smem.d_S, d_S_out.at[row, c, head, columns])

                    return pl.run_state(add)(plgpu.ACC.init(decayed))

                acc = plgpu.ACC(square, f32)
                d_S = pl.run_scoped(go_through, acc, acc, acc)
                plgpu.barrier_arrive(smem.free.at[slot])

                # Whom it is owed to: the chunk before in the list, a slot or the first state.
                bit = jnp.where(source == ROOT, STARTS, bit_of(source))

                def add_to(ref):
                    summed = lax.cond((filled & bit) != 0, lambda: d_S + read(ref), lambda: d_S)
                    ref[...] = summed

                stored_slot = lax.clamp(0, source, slots - 1)
                pl.when(source >= 0)(lambda: add_to(stored.at[lane, stored_slot, head, columns]))
                pl.when(source == ROOT)(lambda: add_to(d_state.at[lane, head, columns]))
                handed_on = source == NEIGHBOR
                filled = jnp.where(handed_on, filled, filled | bit)
                d_S = lax.cond(handed_on, lambda: d_S, zeros)
                return d_S, filled, *following

            if d_last is None:
                d_S = zeros()
            else:
                d_S = read(d_last.at[lane, head, columns])
            lax.fori_loop(0, count, step, (d_S, jnp.int32(0), *link(end)))
            plgpu.wait_smem_to_gmem(0)

        @pl.when(lax.axis_index("group") == 1)
        def memory():
            plgpu.set_max_registers(config.memory_registers, action="decrease")
            key_head = lax.div(head, jnp.int32(N // H))

            @pl.loop(0, count)
            def _(i):
                c, slot = end - i, lax.rem(i, jnp.int32(stages))
                window = window_of(links, row, c)

                @pl.when(i >= stages)
                def _():
                    plgpu.barrier_wait(smem.free.at[slot])

                for source, target in (
                    (d_out.at[row, window, head, columns], smem.d_out),
                    (chunked.k.at[row, window, key_head], smem.k),
                    (chunked.P.at[row, c, head], smem.P),
                    (chunked.T.at[row, c, head], smem.T),
                    (chunked.q.at[row, window, key_head], smem.q),
                    (chunked.beta.at[row, c, head], smem.beta),
                    (chunked.G.at[row, c, head], smem.G),
                ):
                    plgpu.copy_gmem_to_smem(source, target.at[slot], smem.ready.at[slot])

            @pl.loop(lax.max(count - stages, 0), count)
            def _(i):  # leave no barrier phase unobserved
                plgpu.barrier_wait(smem.free.at[lax.rem(i, jnp.int32(stages))])

    d_x, d_S, d_state, _ = launch(
        kernel,
        "gated_delta_walk_back",
        [
            jax.ShapeDtypeStruct((B, n, N, V, CHUNK), dtype),
            jax.ShapeDtypeStruct((B, n, N, V, K), dtype),
            jax.ShapeDtypeStruct((L, N, V, K), f32),
            jax.ShapeDtypeStruct((L, slots, N, V, K), f32),
        ],
        [make_scratch(K, dtype, stages)],
        [links, chunked, d_out, d_last],
        grid={"program": L * N * parts},
        warpgroups=1,
        by_lane=True,
    )
    return d_x, d_S, d_state.swapaxes(2, 3)
