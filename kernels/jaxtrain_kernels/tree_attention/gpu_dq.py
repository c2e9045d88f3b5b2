"""dQ of tree attention for Hopper, Pallas Mosaic GPU; dK and dV are made in gpu_dkv.py.

Goes through tiles of 2 x 64 queries of one head and their lists of key blocks as the forward does.
Given the base-2 log-sum-exp and delta = rowsum(dO O), P = 2^(S - lse) and dS = P (dO V' - delta);
dQ is the sum of dS K over the key blocks. Deterministic.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxtrain_kernels.mosaic import launch, opaque, plgpu, swizzled
from jaxtrain_kernels.tree_attention import gpu_tiles
from jaxtrain_kernels.tree_attention.gpu_tiles import (
    ROWS,
    TILE,
    WARPGROUPS,
    Keys,
    Queries,
    Settings,
)


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of the dQ kernel."""

    k_block: int = 64
    """Keys per step."""
    k_stages: int = 2
    v_stages: int = 2
    tile_stages: int = 2
    """Tiles whose queries are in flight."""
    programs: int = -1
    """Thread blocks that share the tiles; as in the forward's config."""
    in_registers: bool = False
    """Hold a tile's Q and dO in registers: half of the matmuls' traffic with shared memory."""
    compute_registers: int = 240
    memory_registers: int = 24
    """As in gpu_dkv.py."""


def heuristic(head_dim: int, window: bool = False) -> Config:
    if head_dim == 256:  # 227 KiB of shared memory; a window's key positions are a bit too much
        return Config(k_stages=1 if window else 2, v_stages=1, tile_stages=1)
    if head_dim == 192:  # a second tile's queries would be 80 KiB more, which makes 240
        return Config(tile_stages=1)
    return Config(k_stages=3, v_stages=3) if head_dim == 64 else Config()


class Scratch(NamedTuple):
    """Shared memory of a thread block, and its barriers."""

    q: jax.Ref
    """[buffers, ROWS, H]: queries, and at a tile's end their gradient."""
    d_out: jax.Ref
    """[buffers, ROWS, V]."""
    ready: jax.Ref
    ring: gpu_tiles.KeyRing


def dq(queries: Queries, keys: Keys, settings: Settings, config: Config) -> jax.Array:
    """dQ [B, T, N, H]; `keys.lists`: key blocks of `config.k_block` for query tiles of `TILE`."""
    q, window = queries.q, settings.window
    B, T, N, H = q.shape
    V = keys.v.shape[-1]
    bk, tile_stages = config.k_block, config.tile_stages
    shape = gpu_tiles.RingShape(bk, config.k_stages, config.v_stages)
    late = config.k_stages > 1  # release a key slot one step late, behind the next step's scores
    num_tiles = T // TILE
    programs = gpu_tiles.num_programs(config.programs, B * num_tiles * N)
    logit_scale = settings.logit_scale
    wgmma = plgpu.Layout.WGMMA
    per_row = wgmma.reduce(1)

    def kernel(queries: Queries, keys: Keys, dq_ref, smem: Scratch):
        ring = smem.ring
        group = lax.axis_index("group")
        schedule = gpu_tiles.Schedule(
            lax.axis_index("program"), programs, B, num_tiles, N, keys.lists
        )

        def buffer_of(turn):
            return lax.rem(turn, jnp.int32(tile_stages)) * WARPGROUPS

        def load_queries(turn, location):
            rows, buffer = pl.ds(location.first + group * ROWS, ROWS), buffer_of(turn) + group
            for source, target in ((queries.q, smem.q), (queries.d_out, smem.d_out)):
                part = source.at[location.row, rows, location.head]
                plgpu.copy_gmem_to_smem(part, target.at[buffer], smem.ready.at[buffer])

        @pl.when(group < WARPGROUPS)
        def compute():
            plgpu.set_max_registers(config.compute_registers, action="increase")

            load_queries(jnp.int32(0), schedule.first_location())

            def work(visit):
                row, first, head, _ = visit.location
                first, buffer = first + group * ROWS, buffer_of(visit.turn) + group
                rows = pl.ds(first, ROWS)

                def of_rows(ref):
                    return plgpu.load(ref, layout=per_row, optimized=False)

                lse = of_rows(queries.lse.at[row, head, rows])
                delta = of_rows(queries.delta.at[row, head, rows])
                position = None
                if window is not None:
                    position = of_rows(keys.query_positions.at[row, rows])
                plgpu.barrier_wait(smem.ready.at[buffer])
                q_held = do_held = None
                if config.in_registers:
                    q_held = plgpu.load(smem.q.at[buffer], layout=wgmma)
                    do_held = plgpu.load(smem.d_out.at[buffer], layout=wgmma)

                def accumulate(dq):
                    def step(i, code):
                        next_code = gpu_tiles.next_code_of(keys, visit, i)
                        ks, vs = shape.k_slot(visit.before + i), shape.v_slot(visit.before + i)
                        # Opaque, or addresses are computed ahead of the loop and spill.
                        buffer = opaque(buffer_of(visit.turn) + group)
                        plgpu.barrier_wait(ring.k_ready.at[ks])

                        def scores(ref):
                            lhs = q_held if config.in_registers else smem.q.at[buffer]
                            plgpu.wgmma(ref, lhs, ring.k.at[ks].transpose((1, 0)))
                            return ref[...]

                        def across(x):
                            return lax.broadcast_in_dim(x, (ROWS, bk), [0])

                        score = pl.run_scoped(scores, plgpu.ACC((ROWS, bk), jnp.float32))

                        @pl.when(late & (i > 0))
                        def _():  # dQ of the step before, which ran behind, has read its keys
                            plgpu.barrier_arrive(ring.k_free.at[shape.k_slot(visit.before + i - 1)])

                        score = settings.capped(score)
                        weight = jnp.exp2(score * logit_scale - across(lse))

                        def masked():
                            seen = gpu_tiles.seen_in(ring, ks, first, position, bk, window)
                            return jnp.where(seen, weight, 0.0)

                        weight = lax.cond((code & 1) == 1, masked, lambda: weight)
                        slope = settings.slope(weight, score)
                        plgpu.barrier_wait(ring.v_ready.at[vs])

                        def d_weights(ref):
                            lhs = do_held if config.in_registers else smem.d_out.at[buffer]
                            plgpu.wgmma(ref, lhs, ring.v.at[vs].transpose((1, 0)))
                            return ref[...]

                        d_weight = pl.run_scoped(d_weights, plgpu.ACC((ROWS, bk), jnp.float32))
                        plgpu.barrier_arrive(ring.v_free.at[vs])
                        d_score = slope * (d_weight - across(delta))
                        plgpu.wgmma(dq, d_score.astype(q.dtype), ring.k.at[ks])
                        if not late:
                            plgpu.wgmma_wait(0)
                            plgpu.barrier_arrive(ring.k_free.at[ks])
                        return next_code

                    lax.fori_loop(0, visit.count, step, visit.code)
                    result = dq[...]

                    @pl.when(late & (visit.count > 0))
                    def _():
                        last = shape.k_slot(visit.before + visit.count - 1)
                        plgpu.barrier_arrive(ring.k_free.at[last])

                    return result

                result = pl.run_scoped(accumulate, plgpu.ACC((ROWS, H), jnp.float32))
                if tile_stages > 1:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the tile before
                    pl.when(visit.has_next)(lambda: load_queries(visit.turn + 1, visit.following))
                smem.q[buffer] = (result * settings.scale).astype(
                    q.dtype
                )  # the queries are used up
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(smem.q.at[buffer], dq_ref.at[row, rows, head])
                if tile_stages == 1:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    pl.when(visit.has_next)(lambda: load_queries(visit.turn + 1, visit.following))

            schedule.go_through(work)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(group == WARPGROUPS)
        def memory():
            gpu_tiles.serve(schedule, keys, ring, shape, config.memory_registers)

    buffers = tile_stages * WARPGROUPS
    scratch = Scratch(
        q=swizzled((buffers, ROWS, H), q.dtype),
        d_out=swizzled((buffers, ROWS, V), q.dtype),
        ready=plgpu.Barrier(num_barriers=buffers, num_arrivals=2),  # q and d_out
        ring=shape.ring(H, V, q.dtype, window is not None),
    )
    return launch(
        kernel,
        "tree_attention_dq",
        jax.ShapeDtypeStruct(q.shape, q.dtype),
        [scratch],
        [queries, keys],
        grid={"program": programs},
        warpgroups=WARPGROUPS,
    )
