"""Gradients of q, k, v, g and beta, chunk by chunk: Hopper, Pallas Mosaic GPU.

What the walks left of each chunk - the state before it, v', dx and the dS behind it - is all that
its gradients need (chunk.py has the formulas). A thread block owns a chunk and a key head and goes
through that head's value heads one after the other, so dq and dk are sums of a fixed order. Two
warpgroups share the work, and a third fetches operands as their buffers come free:

    the first:   M = D (do v'^T);  dq += e^G (do S^T) + M k;  dv = beta dx and <dx, v>
    the second:  the rest; dk += e^(G_C - G) (v' dS^T) - beta e^G (dx S^T) + M^T q + (Y + Y^T) k

M^T and Y^T come from products of their own instead of through shared memory. As g <= 0, D and its
transpose are e^-|G_i - G_j|, never infinite. dx comes transposed; a product with the identity turns
it, exactly. In inner products with q and k a value head's dq and dk are differences of the
sums behind and before it.
"""

import dataclasses
import functools
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
from jaxtrain_kernels.mosaic import launch, num_cores, opaque, plgpu, swizzled

WARPGROUPS = 2


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of the kernel."""

    compute_registers: int = 240
    memory_registers: int = 24  # 2 x 240 + 24 fill the register file: with 40 the launch hangs


class Scratch(NamedTuple):
    """Shared memory of a thread block, and its barriers. One value head at a time."""

    q: jax.Ref
    """[C, K], and k the same; in the end dq and dk."""
    k: jax.Ref
    d_out: jax.Ref
    """[C, V], and v' and v the same; dv leaves from v's buffer."""
    new: jax.Ref
    v: jax.Ref
    d_x: jax.Ref
    """[V, C]."""
    S: jax.Ref
    """[V, K], and dS the same."""
    d_S: jax.Ref
    beta: jax.Ref
    """[C], and G the same."""
    G: jax.Ref
    sums: jax.Ref
    """[5, C]: what the first warpgroup found, <dx, v>, <q, dq> and half of <dS, S>, and what the
    second passes from rows to columns."""
    d_beta: jax.Ref
    """[C], and dg the same: on their way out."""
    d_g: jax.Ref
    shared_ready: jax.Ref
    """q and k have come; `shared_free`: dq and dk have left from their buffers."""
    shared_free: jax.Ref
    ready: jax.Ref
    """One for each of the groups of buffers below."""
    free: jax.Ref
    sums_ready: jax.Ref
    sums_free: jax.Ref
    finished: jax.Ref
    """Both warpgroups have come here."""


class ChunkItem(NamedTuple):
    """A chunk and a key head."""

    row: jax.Array
    chunk: jax.Array
    key_head: jax.Array


WIDE = ("q", "k", "d_out", "new", "v", "d_x", "S", "d_S")

GROUPS = (("d_out", "new", "G", "beta"), ("d_x",), ("S",), ("d_S",), ("v",))
"""Buffers that are filled and given back together."""
TOKENS, D_X, STATE, D_STATE, VALUES = range(len(GROUPS))


def make_scratch(K: int, V: int, dtype) -> Scratch:
    keys, values, states = (swizzled((1, *shape), dtype) for shape in ((C, K), (C, V), (V, K)))
    line = plgpu.SMEM((C,), jnp.float32)
    return Scratch(
        q=keys,
        k=keys,
        d_out=values,
        new=values,
        v=values,
        d_x=swizzled((1, V, C), dtype),
        S=states,
        d_S=states,
        beta=line,
        G=line,
        sums=plgpu.SMEM((5, C), jnp.float32),
        d_beta=line,
        d_g=line,
        shared_ready=plgpu.Barrier(num_arrivals=2),
        shared_free=plgpu.Barrier(num_arrivals=WARPGROUPS),
        ready=tuple(plgpu.Barrier(num_arrivals=len(group)) for group in GROUPS),
        # v is the first warpgroup's alone.
        free=tuple(plgpu.Barrier(num_arrivals=WARPGROUPS - (i == VALUES)) for i in range(5)),
        sums_ready=plgpu.Barrier(),
        sums_free=plgpu.Barrier(),
        finished=plgpu.Barrier(num_arrivals=WARPGROUPS),
    )


def gradients(
    links: Links,
    chunked: Chunked,
    S: jax.Array,
    new: jax.Array,
    d_out: jax.Array,
    d_x: jax.Array,
    d_S: jax.Array,
    *,
    onto: tuple[jax.Array, ...] = (),
    config: Config = Config(),
) -> tuple[jax.Array, ...]:
    """(dq, dk [B, T, H, K], dv [B, T, N, V], of the inputs' dtype; dg and dbeta float32
    [B, n, N, C]).

    S [B, n, N, V, K], transposed: the state before each chunk; new [B, n, N, C, V]: v'; d_out
    [B, T, N, V]; d_x [B, n, N, V, C] and d_S [B, n, N, V, K]: what `gpu_walk_back.walk_back`
    gives. onto: what dq, dk and dv are written to, 0 in the tiles of `links.blank`; none: windows
    do not overlap. Of dg and dbeta nothing is written for chunks behind a row's last, and what is
    at tokens of others means nothing.
    """
    B, _, H, K = chunked.q.shape
    N, V = chunked.v.shape[2:]
    n, heads, dtype = chunked.G.shape[1], N // H, chunked.q.dtype
    items = B * n * H
    programs = min(num_cores(), items)
    f32, square = jnp.float32, (C, C)

    def kernel(links, chunked, S, new, d_out, d_x, d_S, dq, dk, dv, d_g, d_beta, scratch: Scratch):
        smem = scratch._replace(**{name: getattr(scratch, name).at[0] for name in WIDE})
        group = lax.axis_index("group")
        wgmma = plgpu.Layout.WGMMA

        def here(smem: Scratch) -> Scratch:
            """Return `smem` with opaque indices: else addresses are computed ahead of all loops and
            spill."""
            zero = opaque(jnp.int32(0))
            return smem._replace(**{name: getattr(smem, name).at[zero] for name in WIDE})

        def go_through(work):
            """work(place, value heads before) for each chunk and key head of this thread block."""

            def body(i, before):
                item = i * programs + lax.axis_index("program")
                key_head, chunk_index = lax.rem(item, jnp.int32(H)), lax.div(item, jnp.int32(H))
                row, c = lax.div(chunk_index, jnp.int32(n)), lax.rem(chunk_index, jnp.int32(n))
                used = (item < items) & (c < links.total[lax.min(row, B - 1)])
                pl.when(used)(lambda: work(ChunkItem(row, c, key_head), before))
                return before + jnp.where(used, heads, 0)

            return lax.fori_loop(0, -(-items // programs), body, jnp.int32(0))

        def by_row(ref):
            return plgpu.load(ref, layout=wgmma.reduce(1))

        def by_column(ref):
            return plgpu.load(ref, layout=wgmma.reduce(0))

        def along(x, width):
            """Broadcast a number per row."""
            return lax.broadcast_in_dim(x, (C, width), [0])

        def across(x):
            """Broadcast a number per column of a square."""
            return lax.broadcast_in_dim(x, square, [1])

        def loaded(ref):
            return plgpu.load(ref, layout=wgmma).astype(f32)

        def product(width, *pairs):
            """Sum of products of shared memory; [C, width]."""

            def multiply(acc):
                for lhs, rhs in pairs:
                    plgpu.wgmma(acc, lhs, rhs)
                return acc[...]

            return pl.run_scoped(multiply, plgpu.ACC((C, width), f32))

        def plus(total, *pairs):
            def multiply(acc):
                for lhs, rhs in pairs:
                    plgpu.wgmma(acc, lhs, rhs)

            return pl.run_state(multiply)(plgpu.ACC.init(total))

        def zeros(shape, layout=wgmma):
            return plgpu.layout_cast(jnp.zeros(shape, f32), layout)

        def turned(ref):
            return ref.transpose((1, 0))

        def index():
            # Opaque, or 32 comparisons are made ahead of the loop and spill.
            i, j = (plgpu.broadcasted_iota(jnp.int32, square, a, layout=wgmma) for a in (0, 1))
            return i + opaque(jnp.int32(0)), j

        def send(buffer, target, item, head):
            """Write a chunk's window to its tokens."""
            by_head = target.at[item.row, :, head]
            put_rows(buffer, by_head, links, item.row, item.chunk, not onto)

        def own_rows_here(item):
            """bool [C]: rows of the chunk. The window's other rows also have gradients of o, and so
            a dq."""
            index = plgpu.broadcasted_iota(jnp.int32, (C,), 0, layout=wgmma.reduce(1))
            return own_rows(links, item.row, item.chunk)(index)

        def nearness():
            """e^-|G_i - G_j|."""
            apart = along(by_row(smem.G), C) - across(by_column(smem.G))
            # -|x| as a minimum: exact, and never positive, so that exp does not overflow above the
            # diagonal.
            return jnp.exp(jnp.minimum(apart, -apart))

        def wait(group):
            plgpu.barrier_wait(smem.ready[group])

        def give_back(group):
            plgpu.commit_smem()  # what was read into registers is overwritten by TMA
            plgpu.barrier_arrive(smem.free[group])

        def meet():
            plgpu.barrier_arrive(smem.finished)
            plgpu.barrier_wait(smem.finished)

        @pl.when(group == 0)
        def queries():
            plgpu.set_max_registers(config.compute_registers, action="increase")

            def work(item: ChunkItem, done):
                plgpu.barrier_wait(smem.shared_ready)

                def value_head(r, carry):
                    smem = here(scratch)
                    total, before = carry
                    head = item.key_head * heads + r
                    wait(TOKENS)
                    M = product(C, (smem.d_out, turned(smem.new)))
                    i, j = index()
                    low_M = jnp.where(i >= j, M * nearness(), 0.0).astype(dtype)
                    eG, beta = jnp.exp(by_row(smem.G)), by_row(smem.beta)
                    wait(STATE)
                    total += along(eG, K) * product(K, (smem.d_out, smem.S))
                    give_back(TOKENS)
                    total = plus(total, (low_M, smem.k))
                    behind = (total * loaded(smem.q)).sum(axis=1)

                    wait(D_X)
                    # Transpose by a product with the identity: exact, for each sum has one nonzero
                    # term.
                    identity = jnp.where(i == j, 1.0, 0.0).astype(dtype)
                    x = product(V, (identity, turned(smem.d_x)))
                    give_back(D_X)
                    wait(VALUES)
                    pull = (x * loaded(smem.v)).sum(axis=1)
                    smem.v[...] = (along(beta, V) * x).astype(dtype)
                    plgpu.commit_smem()
                    send(smem.v, dv, item, head)

                    wait(D_STATE)
                    part = pl.ds(0, C)
                    inner = (loaded(smem.S.at[part]) * loaded(smem.d_S.at[part])).sum(axis=1)
                    give_back(STATE)
                    give_back(D_STATE)
                    # The buffer of sums is free at first; a wait would deadlock before the first
                    # arrival.
                    pl.when(done + r > 0)(lambda: plgpu.barrier_wait(smem.sums_free))
                    smem.sums[0] = pull
                    smem.sums[1] = jnp.where(own_rows_here(item), behind - before, 0.0)
                    smem.sums[2] = inner
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(smem.sums_ready)
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    plgpu.barrier_arrive(smem.free[VALUES])
                    return total, behind

                start = zeros((C, K)), zeros((C,), wgmma.reduce(1))
                total, _ = lax.fori_loop(0, heads, value_head, start)
                meet()
                total = jnp.where(along(own_rows_here(item), K), total, 0.0)
                smem.q[...] = total.astype(dtype)
                plgpu.commit_smem()
                send(smem.q, dq, item, item.key_head)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(smem.shared_free)

            done = go_through(work)
            pl.when(done > 0)(lambda: plgpu.barrier_wait(smem.sums_free))
            plgpu.wait_smem_to_gmem(0)

        @pl.when(group == 1)
        def keys():
            plgpu.set_max_registers(config.compute_registers, action="increase")

            def work(item: ChunkItem, done):
                plgpu.barrier_wait(smem.shared_ready)

                def value_head(r, carry):
                    smem = here(scratch)
                    total, before = carry
                    head = item.key_head * heads + r
                    wait(TOKENS)
                    i, j = index()
                    M = product(C, (smem.new, turned(smem.d_out)))  # its transpose
                    is_own = own_rows(links, item.row, item.chunk)
                    low_M = jnp.where((i <= j) & is_own(j), M * nearness(), 0.0).astype(dtype)
                    beta = by_row(smem.beta)
                    eG = jnp.exp(by_row(smem.G))
                    last = smem.G[C - 1]
                    rest = jnp.exp(last - by_row(smem.G))

                    wait(D_X)
                    lower = product(C, (turned(smem.d_x), turned(smem.new)))
                    lower = jnp.where(i > j, -lower * nearness(), 0.0)
                    kk = product(C, (smem.k, turned(smem.k)))
                    by_k = -(lower * kk).sum(axis=1)
                    low_Y = (along(beta, C) * lower).astype(dtype)
                    upper = product(C, (smem.new, smem.d_x)) * across(by_column(smem.beta))
                    low_Y = jnp.where(i < j, (-upper * nearness()).astype(dtype), low_Y)

                    wait(STATE)
                    seen = product(K, (turned(smem.d_x), smem.S)) * along(eG, K)
                    give_back(D_X)
                    by_k += (seen * loaded(smem.k)).sum(axis=1)
                    total -= along(beta, K) * seen
                    wait(D_STATE)
                    from_d_S = product(K, (smem.new, smem.d_S)) * along(rest, K)
                    give_back(TOKENS)
                    ends = (from_d_S * loaded(smem.k)).sum(axis=1)
                    total += from_d_S
                    part = pl.ds(C, C)
                    inner = (loaded(smem.S.at[part]) * loaded(smem.d_S.at[part])).sum(axis=1)
                    give_back(STATE)
                    give_back(D_STATE)
                    total = plus(total, (low_M, smem.q), (low_Y, smem.k))
                    behind = (total * loaded(smem.k)).sum(axis=1)

                    plgpu.barrier_wait(smem.sums_ready)
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # dg of the head before
                    smem.d_beta[...] = by_row(smem.sums.at[0]) - by_k
                    smem.sums[3] = by_row(smem.sums.at[1]) - (behind - before) - 2.0 * beta * by_k
                    decayed = by_row(smem.sums.at[2]) + inner
                    smem.sums[4] = ends + decayed * jnp.exp(last)
                    plgpu.commit_smem()
                    d_G, everywhere = by_column(smem.sums.at[3]), by_column(smem.sums.at[4])
                    summed = jnp.where(i <= j, across(d_G), 0.0) + across(everywhere)
                    smem.d_g[...] = summed.sum(axis=1)
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(smem.sums_free)
                    plgpu.copy_smem_to_gmem(smem.d_beta, d_beta.at[item.row, item.chunk, head])
                    plgpu.copy_smem_to_gmem(smem.d_g, d_g.at[item.row, item.chunk, head])
                    return total, behind

                start = zeros((C, K)), zeros((C,), wgmma.reduce(1))
                total, _ = lax.fori_loop(0, heads, value_head, start)
                meet()
                smem.k[...] = total.astype(dtype)
                plgpu.commit_smem()
                send(smem.k, dk, item, item.key_head)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(smem.shared_free)

            go_through(work)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(group == WARPGROUPS)
        def memory():
            plgpu.set_max_registers(config.memory_registers, action="decrease")
            copy = plgpu.copy_gmem_to_smem

            def work(item: ChunkItem, done):
                pl.when(done > 0)(lambda: plgpu.barrier_wait(smem.shared_free))
                window = window_of(links, item.row, item.chunk)
                key = (item.row, window, item.key_head)
                copy(chunked.q.at[key], smem.q, smem.shared_ready)
                copy(chunked.k.at[key], smem.k, smem.shared_ready)

                @pl.loop(0, heads)
                def _(r):
                    head = item.key_head * heads + r
                    tokens = (item.row, window, head)
                    chunk = (item.row, item.chunk, head)
                    sources = {
                        "d_out": d_out.at[tokens],
                        "new": new.at[chunk],
                        "v": chunked.v.at[tokens],
                        "G": chunked.G.at[chunk],
                        "beta": chunked.beta.at[chunk],
                        "d_x": d_x.at[chunk],
                        "S": S.at[chunk],
                        "d_S": d_S.at[chunk],
                    }
                    for group, names in enumerate(GROUPS):
                        wait = functools.partial(plgpu.barrier_wait, smem.free[group])
                        pl.when(done + r > 0)(wait)
                        for name in names:
                            copy(sources[name], getattr(smem, name), smem.ready[group])

            done = go_through(work)

            @pl.when(done > 0)
            def _():  # leave no barrier phase unobserved
                plgpu.barrier_wait(smem.shared_free)
                for group in range(len(GROUPS)):
                    plgpu.barrier_wait(smem.free[group])

    by_token = [jax.ShapeDtypeStruct(x.shape, dtype) for x in (chunked.q, chunked.k, chunked.v)]
    by_chunk = [jax.ShapeDtypeStruct((B, n, N, C), f32)] * 2
    dq, dk, dv, d_g, d_beta = launch(
        kernel,
        "gated_delta_gradients",
        by_chunk if onto else [*by_token, *by_chunk],
        [make_scratch(K, V, dtype)],
        [links, chunked, S, new, d_out, d_x, d_S],
        grid={"program": programs},
        warpgroups=WARPGROUPS,
        by_lane=True,
        onto=onto,
    )
    return dq, dk, dv, d_g, d_beta
