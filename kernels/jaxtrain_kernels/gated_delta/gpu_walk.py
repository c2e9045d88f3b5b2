"""The state's walk through the chunks of a list, first to last: Hopper, Pallas Mosaic GPU.

With the state S before a chunk (letters in chunk.py):

    x = beta (v - e^G (k S));  v' = T x;  o = e^G (q S) + P v'
    S behind = e^(G_C) S + k^T (e^(G_C - G) v')

A warpgroup owns 64 columns of V of one value head of one list, and shares nothing. It holds S
transposed, [64, K] in float32 registers: then S, x and v' are each the left operand of the next
product, which wgmma takes from registers, and nothing of the chain goes through shared memory.

States that wait for later chunks are left in slots in global memory, which the same threads read
that wrote them.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxtrain_kernels.gated_delta.gpu_windows import (
    C,
    Chunked,
    Links,
    own_rows,
    put_rows,
    window_of,
)
from jaxtrain_kernels.mosaic import launch, plgpu, swizzled
from jaxtrain_kernels.recurrence.chunks import NEIGHBOR, ROOT

ROWS = 64  # columns of V of a warpgroup: the rows of a wgmma


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of the kernel."""

    stages: int = 3
    """Chunks in flight."""
    compute_registers: int = 248
    memory_registers: int = 24


class Scratch(NamedTuple):
    """Shared memory of a thread block, and its barriers."""

    k: jax.Ref
    """[stages, C, K]: a ring, as q, v, T, P, beta and G."""
    q: jax.Ref | None
    """This and P for outputs alone."""
    v: jax.Ref
    """[stages, C, ROWS]."""
    T: jax.Ref
    P: jax.Ref | None
    beta: jax.Ref
    G: jax.Ref
    out: jax.Ref
    """[C, ROWS]: outputs, or v', on their way out."""
    S: jax.Ref | None
    """[ROWS, K], for states alone."""
    ready: jax.Ref
    free: jax.Ref


def make_scratch(key_dim: int, dtype, stages: int, states: bool) -> Scratch:
    keys = swizzled((stages, C, key_dim), dtype)
    square = swizzled((stages, C, C), dtype)
    per_token = plgpu.SMEM((stages, C), jnp.float32)
    return Scratch(
        k=keys,
        q=None if states else keys,
        v=swizzled((stages, C, ROWS), dtype),
        T=square,
        P=None if states else square,
        beta=per_token,
        G=per_token,
        out=swizzled((C, ROWS), dtype),
        S=swizzled((ROWS, key_dim), dtype) if states else None,
        # One arrival for each copy.
        ready=plgpu.Barrier(num_barriers=stages, num_arrivals=5 if states else 7),
        free=plgpu.Barrier(num_barriers=stages),
    )


def walk(
    links: Links,
    chunked: Chunked,
    state: jax.Array | None,
    slots: int,
    *,
    onto: jax.Array | None = None,
    states: bool = False,
    config: Config = Config(),
) -> tuple[jax.Array, jax.Array]:
    """(o [B, T, N, V], the state behind each list float32 [L, N, K, V]), or with `states` (v' by
    chunk [B, n, N, C, V], the state before each chunk transposed [B, n, N, V, K], both in q's
    dtype).

    `state` float32 [B, N, K, V]: before roots; None: zeros. onto: what o is written to, 0 in the
    tiles of `links.blank`; None: windows do not overlap. Chunks of no list are left out.
    """
    B, _, H, K = chunked.q.shape
    N, V = chunked.v.shape[2:]
    L, n, parts = len(links.count), chunked.G.shape[1], V // ROWS
    dtype, f32 = chunked.q.dtype, jnp.float32
    stages = config.stages
    if state is not None:
        state = state.swapaxes(2, 3)

    def kernel(links, chunked, state, out, behind, state_slots, smem: Scratch):
        program = lax.axis_index("program")
        part = lax.rem(program, jnp.int32(parts))
        head = lax.rem(lax.div(program, jnp.int32(parts)), jnp.int32(N))
        lane = lax.div(program, jnp.int32(parts * N))
        columns = pl.ds(pl.multiple_of(part * ROWS, ROWS), ROWS)
        row, first, count = links.row[lane], links.first[lane], links.count[lane]

        @pl.when(lax.axis_index("group") == 0)
        def compute():
            plgpu.set_max_registers(config.compute_registers, action="increase")
            wgmma = plgpu.Layout.WGMMA
            square = plgpu.ACC((ROWS, C), f32)

            def read(ref):
                return plgpu.load(ref, layout=wgmma, optimized=False)

            def at_root():
                if state is None:
                    return plgpu.layout_cast(jnp.zeros((ROWS, K), f32), wgmma)
                return read(state.at[row, head, columns])

            def laid(x):
                return plgpu.layout_cast(x, wgmma)

            def per_column(x):
                return laid(lax.broadcast_in_dim(x, (ROWS, C), [1]))

            def link(c):
                c = lax.min(c, first + count - 1)
                return links.source[row, c], links.keep[row, c]

            column = plgpu.broadcasted_iota(jnp.int32, (C,), 0, layout=wgmma.reduce(0))

            def send(rows, c):
                """v' or outputs of a chunk, transposed on the way."""
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the chunk before
                rows = plgpu.layout_cast(rows, plgpu.Layout.WGMMA_TRANSPOSED)
                smem.out.transpose((1, 0))[...] = rows
                plgpu.commit_smem()
                if states:
                    plgpu.copy_smem_to_gmem(smem.out, out.at[row, c, head, :, columns])
                else:
                    put_rows(smem.out, out.at[row, :, head, columns], links, row, c, onto is None)

            def step(i, carry):
                S, held, source, keep = carry
                c, slot = first + i, lax.rem(i, jnp.int32(stages))
                following = link(c + 1)

                def elsewhere():
                    stored_slot = lax.clamp(0, source, slots - 1)
                    stored = lambda: read(state_slots.at[lane, stored_slot, head, columns])  # noqa: E731
                    return lax.cond(source == ROOT, at_root, stored)

                S = laid(lax.cond(source == NEIGHBOR, lambda: S, elsewhere))
                low_S = laid(S.astype(dtype))
                plgpu.barrier_wait(smem.ready.at[slot])

                def seen(seen_ref, asked_ref=None):
                    plgpu.wgmma(seen_ref, low_S, smem.k.at[slot].transpose((1, 0)))
                    if not states:
                        plgpu.wgmma(asked_ref, low_S, smem.q.at[slot].transpose((1, 0)))
                    # Meanwhile what needs neither: the chunk before leaves, this one's factors.
                    pl.when(i > 0)(lambda: send(held, c - 1))
                    if states:
                        smem.S[...] = low_S
                        plgpu.commit_smem()
                        plgpu.copy_smem_to_gmem(smem.S, behind.at[row, c, head, columns])
                    G = plgpu.load(smem.G.at[slot], layout=wgmma.reduce(0))
                    beta = plgpu.load(smem.beta.at[slot], layout=wgmma.reduce(0))
                    last = smem.G[slot, C - 1]
                    eG, rest = jnp.exp(G), jnp.exp(last - G)
                    v = read(smem.v.at[slot].transpose((1, 0))).astype(f32)
                    bv, factor = laid(v * per_column(beta)), per_column(-beta * eG)
                    before = laid(S * jnp.exp(last))
                    seen_now = laid(
                        plgpu.wgmma_accumulator_load(seen_ref, wait_n=0 if states else 1)
                    )
                    x = laid((bv + factor * seen_now).astype(dtype))

                    def solve(ref):
                        plgpu.wgmma(ref, x, smem.T.at[slot].transpose((1, 0)))
                        return laid(ref[...])

                    new = pl.run_scoped(solve, square)
                    queried = ()
                    if not states:
                        row_factor = jnp.where(
                            own_rows(links, row, c)(column), eG, 0.0
                        )  # q is others'
                        queried = (laid(asked_ref[...] * per_column(row_factor)),)
                    return before, rest, new, *queried

                accs = (square,) if states else (square, square)
                before, rest, new, *queried = pl.run_scoped(seen, *accs)
                low_new = laid(new.astype(dtype))
                decayed = laid((new * per_column(rest)).astype(dtype))

                def leave(refs):
                    plgpu.wgmma(refs[0], decayed, smem.k.at[slot])
                    if not states:
                        plgpu.wgmma(refs[1], low_new, smem.P.at[slot].transpose((1, 0)))

                S, *own_out = pl.run_state(leave)(
                    tuple(plgpu.ACC.init(x) for x in (before, *queried))
                )
                plgpu.commit_smem()  # v was read into registers, and TMA overwrites it
                plgpu.barrier_arrive(smem.free.at[slot])

                @pl.when(keep < slots)
                def _():
                    state_slots.at[lane, lax.min(keep, slots - 1), head, columns][...] = S

                return S, low_new if states else laid(own_out[0].astype(dtype)), *following

            nothing = plgpu.layout_cast(jnp.zeros((ROWS, C), dtype), wgmma)
            carry = (at_root(), nothing, *link(first))
            S, held, *_ = lax.fori_loop(0, count, step, carry)
            pl.when(count > 0)(lambda: send(held, first + count - 1))
            if not states:
                behind.at[lane, head, columns][...] = S
            plgpu.wait_smem_to_gmem(0)

        @pl.when(lax.axis_index("group") == 1)
        def memory():
            plgpu.set_max_registers(config.memory_registers, action="decrease")
            key_head = lax.div(head, jnp.int32(N // H))

            @pl.loop(0, count)
            def _(i):
                c, slot = first + i, lax.rem(i, jnp.int32(stages))
                window = window_of(links, row, c)

                @pl.when(i >= stages)
                def _():
                    plgpu.barrier_wait(smem.free.at[slot])

                for source, target in (
                    (chunked.k.at[row, window, key_head], smem.k),
                    (chunked.q.at[row, window, key_head], smem.q),
                    (chunked.v.at[row, window, head, columns], smem.v),
                    (chunked.T.at[row, c, head], smem.T),
                    (chunked.P.at[row, c, head], smem.P),
                    (chunked.beta.at[row, c, head], smem.beta),
                    (chunked.G.at[row, c, head], smem.G),
                ):
                    if target is not None:
                        plgpu.copy_gmem_to_smem(source, target.at[slot], smem.ready.at[slot])

            @pl.loop(lax.max(count - stages, 0), count)
            def _(i):  # leave no barrier phase unobserved
                plgpu.barrier_wait(smem.free.at[lax.rem(i, jnp.int32(stages))])

    if states:
        behind = jax.ShapeDtypeStruct((B, n, N, V, K), dtype)
    else:
        behind = jax.ShapeDtypeStruct((L, N, V, K), f32)
    results = [behind, jax.ShapeDtypeStruct((L, slots, N, V, K), f32)]
    if onto is None:
        out = (B, n, N, C, V) if states else chunked.v.shape
        results = [jax.ShapeDtypeStruct(out, dtype), *results]
    out, behind, _ = launch(
        kernel,
        "gated_delta_walk_states" if states else "gated_delta_walk",
        results,
        [make_scratch(K, dtype, stages, states)],
        [links, chunked, state],
        grid={"program": L * N * parts},
        warpgroups=1,
        by_lane=True,
        onto=() if onto is None else (onto,),
    )
    return out, behind if states else behind.swapaxes(2, 3)
