"""The one pass over given logits for Hopper, Pallas Mosaic GPU.

A compute warpgroup walks stretches of 64 rows x some of the columns, each with its own ring of
shared memory, which a memory warpgroup keeps full by TMA and never stops between stretches. A chunk
is read twice from shared memory: once for the rows' maxima (over registers and four lanes), once
for one exponential per logit.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxtrain_kernels.mosaic import launch, num_cores, plgpu, swizzled

LOG2E = math.log2(math.e)
ROWS, WIDTH = 64, 64  # rows of a warpgroup; columns of a swizzled piece of shared memory
LOWEST = -1e30  # below any logit, yet finite: 0 times the first shift must not be NaN


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of the kernel."""

    columns: int = 256
    """Logits of a row in a chunk: a multiple of 64."""
    warpgroups: int = 3
    """Compute warpgroups of a thread block."""
    stages: int = 2
    """Chunks in flight for each of them."""
    sums: int = 16
    """Columns that a row's sums are kept in: independent chains of additions."""


def heuristic(V: int) -> Config:
    del V
    return Config()


def choose_parts(T: int, V: int, config: Config, cores: int) -> int:
    """Stretches that a row is cut into so that all warpgroups have the same work."""
    chunks, workers = pl.cdiv(V, config.columns), cores * config.warpgroups

    def longest(parts):
        return pl.cdiv(pl.cdiv(T, ROWS) * parts, workers) * (4 * pl.cdiv(chunks, parts) + 1)

    return min(range(1, min(chunks, 256) + 1), key=longest)


def statistics(logits, factor, *, config: Config):
    """float32 [3, P, T] of P parts of each row: maximum m, sum of w, sum of w log2 w.

    logits bfloat16 [T, V], T a multiple of 8 and at least 64, V of 64 and at least a chunk;
    w = 2^(z factor - m) with `factor` float32 [T], positive. The parts are disjoint and cover the
    row.
    """
    T, V = logits.shape
    size, groups, stages = config.columns, config.warpgroups, config.stages
    cores = num_cores()
    parts = choose_parts(T, V, config, cores)
    chunks = pl.cdiv(V, size)
    length = pl.cdiv(chunks, parts)  # chunks of a stretch; the last ones may own nothing
    stretches = pl.cdiv(T, ROWS) * parts
    workers = cores * groups
    wgmma = plgpu.Layout.WGMMA
    per_row = wgmma.reduce(1)

    def kernel(logits_ref, factor_ref, out_ref, ring, out_smem, ready, free):
        core, group = lax.axis_index("core"), lax.axis_index("group")

        def count_of(member):
            worker = core * groups + member
            return lax.div(stretches - worker + workers - 1, jnp.int32(workers))

        def stretch_of(member, i):
            """(first row, part) of a warpgroup's i-th stretch; the last rows may overlap."""
            stretch = core * groups + member + i * workers
            row = lax.div(stretch, jnp.int32(parts)) * ROWS
            return lax.min(row, jnp.int32(T - ROWS)), lax.rem(stretch, jnp.int32(parts))

        def slot_of(member, step):
            return member * stages + lax.rem(step, jnp.int32(stages))

        @pl.when(group < groups)
        def compute():
            def stretch(i, _):
                row, part = stretch_of(group, i)
                rows = pl.ds(pl.multiple_of(row, 8), ROWS)
                scale = plgpu.load(factor_ref.at[rows], layout=per_row, optimized=False)

                def spread(column, width):
                    return lax.broadcast_in_dim(column, (ROWS, width), [0])

                def chunk(m, carry):
                    slot = slot_of(group, i * length + m)
                    first = (part * length + m) * size
                    start = lax.min(first, jnp.int32(V - size))
                    plgpu.barrier_wait(ready.at[slot])

                    def through(masked):
                        top, total, moment = carry

                        def read(q):
                            x = plgpu.load(ring.at[slot, :, pl.ds(q * WIDTH, WIDTH)], layout=wgmma)
                            if not masked:
                                return x
                            column = plgpu.broadcasted_iota(
                                jnp.int32, (ROWS, WIDTH), 1, layout=wgmma
                            )
                            owned = column >= first - start - q * WIDTH
                            return jnp.where(owned, x, jnp.bfloat16(-jnp.inf))

                        high = read(0)
                        for q in range(1, size // WIDTH):
                            high = jnp.maximum(high, read(q))
                        high = high.astype(jnp.float32).max(axis=1) * scale
                        new_top = jnp.maximum(top, high)
                        shift = top - new_top
                        decay = spread(jnp.exp2(shift), config.sums)
                        moment = (moment + total * spread(shift, config.sums)) * decay
                        total = total * decay
                        factor, base = spread(scale, WIDTH), spread(new_top, WIDTH)
                        for q in range(size // WIDTH):
                            power = read(q).astype(jnp.float32) * factor - base
                            power = jnp.maximum(power, -150.0)  # 2^-150 is 0: no 0 * -inf
                            weight = jnp.exp2(power)
                            product = weight * power
                            for c in range(0, WIDTH, config.sums):
                                total += weight[:, c : c + config.sums]
                                moment += product[:, c : c + config.sums]
                        return new_top, total, moment

                    if V % size or chunks % parts:
                        carry = lax.cond(
                            start < first, lambda: through(True), lambda: through(False)
                        )
                    else:
                        carry = through(False)
                    # TMA overwrites what was just read into registers: order the two.
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(free.at[slot])
                    return carry

                top = plgpu.layout_cast(jnp.full((ROWS,), LOWEST, jnp.float32), per_row)
                zeros = plgpu.layout_cast(jnp.zeros((ROWS, config.sums), jnp.float32), wgmma)
                top, total, moment = lax.fori_loop(0, length, chunk, (top, zeros, zeros))
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                for k, value in enumerate((top, total.sum(axis=1), moment.sum(axis=1))):
                    out_smem[group, k] = value
                plgpu.commit_smem()
                for k in range(3):
                    plgpu.copy_smem_to_gmem(out_smem.at[group, k], out_ref.at[k, part, rows])
                return 0

            lax.fori_loop(0, count_of(group), stretch, 0)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(group == groups)
        def memory():
            counts = [count_of(jnp.int32(member)) for member in range(groups)]

            def stretch(i, _):
                def chunk(m, _):
                    for member, count in enumerate(counts):
                        row, part = stretch_of(jnp.int32(member), i)
                        step = i * length + m
                        slot = slot_of(jnp.int32(member), step)
                        start = lax.min((part * length + m) * size, jnp.int32(V - size))

                        @pl.when((i < count) & (step >= stages))
                        def _(slot=slot):
                            plgpu.barrier_wait(free.at[slot])

                        @pl.when(i < count)
                        def _(row=row, slot=slot, start=start):
                            rows = pl.ds(pl.multiple_of(row, 8), ROWS)
                            columns = pl.ds(pl.multiple_of(start, WIDTH), size)
                            plgpu.copy_gmem_to_smem(
                                logits_ref.at[rows, columns], ring.at[slot], ready.at[slot]
                            )

                    return 0

                return lax.fori_loop(0, length, chunk, 0)

            lax.fori_loop(0, counts[0], stretch, 0)  # the first has the most
            for member, count in enumerate(counts):  # leave no barrier phase unobserved

                @pl.loop(lax.max(count * length - stages, 0), count * length)
                def _(step, member=member):
                    plgpu.barrier_wait(free.at[slot_of(jnp.int32(member), step)])

    scratch = [
        swizzled((groups * stages, ROWS, size), jnp.bfloat16),
        plgpu.SMEM((groups, 3, ROWS), jnp.float32),
        plgpu.Barrier(num_barriers=groups * stages),
        plgpu.Barrier(num_barriers=groups * stages),
    ]
    out_type = jax.ShapeDtypeStruct((3, parts, T), jnp.float32)
    arrays, grid = [logits, factor], {"core": cores}
    return launch(kernel, "logp_of_logits", out_type, scratch, arrays, grid=grid, warpgroups=groups)
