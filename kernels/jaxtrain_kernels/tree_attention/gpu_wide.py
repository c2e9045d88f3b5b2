"""Gradients of tree attention at head dim 512: Hopper, Pallas Mosaic GPU.

dK and dV of 64 keys would fill the registers of a multiprocessor and leave none for scores. So each
gradient has a kernel, which makes its own scores again: 8 matmuls for the 5 of one kernel. A thread
block owns 64 rows, keys or queries; each compute warpgroup adds up half of the columns of their
gradient; the other side's rows come in blocks of 32. Deterministic: no two thread blocks add to the
same number. Given the base-2 log-sum-exp and delta = rowsum(dO O), P = 2^(S - lse) and
dS = P (dO V' - delta).

dV += P' dO: both warpgroups compute the scores of all 64 keys.

dK += dS' Q and dQ += dS K are one kernel; they differ in whose numbers stand along the rows. While
one warpgroup makes P the other makes dO V':

    first     S, then P into shared memory    waits for dS    adds dS times its columns
    second    dO V'    waits for P    dS in the place of P    adds dS times its columns

P is handed over in low precision. What is added up runs in front of the next step's first product,
and its operand is given back as soon as it is done: the block after next has a whole step to come.
Two blocks of the other operand, dO or V, would find no room: its columns come in chunks.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxtrain_kernels.mosaic import launch, num_cores, opaque, plgpu, swizzled
from jaxtrain_kernels.tree_attention import gpu_tiles
from jaxtrain_kernels.tree_attention.gpu_tiles import ROWS, WARPGROUPS, Keys, Queries, Settings

WIDTH = 512
BLOCK = 32  # rows of the other side in a step
STAGES = 2  # steps whose blocks are in flight
CHUNK = 128  # columns
CHUNKS = 3  # in flight
COLUMNS = WIDTH // WARPGROUPS  # of the gradient that a warpgroup adds up
ENOUGH = 3  # tiles of keys for each multiprocessor
COMPUTE_REGISTERS, MEMORY_REGISTERS = 240, 24  # as in gpu_dkv.py


def takes(head_dim: int) -> bool:
    return head_dim == WIDTH


class Stream(NamedTuple):
    """A ring of blocks, or of chunks of their columns."""

    blocks: jax.Ref
    """[slots, BLOCK, WIDTH or CHUNK]."""
    ready: jax.Ref
    free: jax.Ref

    @property
    def slots(self) -> int:
        return self.blocks.shape[0]

    @property
    def chunks(self) -> int:
        """Chunks of a block."""
        return WIDTH // self.blocks.shape[-1]

    def slot(self, number):
        return lax.rem(number, jnp.int32(self.slots))


class Scratch(NamedTuple):
    """Shared memory of a thread block, and its barriers."""

    rows: jax.Ref
    """[ROWS, WIDTH]: the thread block's keys or queries."""
    rows_pair: jax.Ref | None
    """[ROWS, WIDTH]: what belongs to them: of keys their values, of queries their dO."""
    weights: jax.Ref | None
    """[ROWS, BLOCK]: P, then dS."""
    other_rows: Stream
    """Queries or keys of the other side."""
    other_rows_pair: Stream
    """And theirs."""
    numbers: tuple[jax.Ref, ...]
    """[STAGES, BLOCK] each, which come with `other_rows`: lse, delta or since, until; positions."""
    ready: jax.Ref
    """Of `rows` and of `rows_pair`."""
    handed: jax.Ref | None
    """P is in `weights`; dS is."""
    met: jax.Ref | None
    """Both compute warpgroups have come here."""


def make_scratch(of_keys: bool, of_scores: bool, window: int | None, dtype) -> Scratch:
    """of_keys: for dK or dV; of_scores: for dK or dQ, which are made of dS."""

    def stream(slots, width, columns, num_arrivals, readers):
        ready = plgpu.Barrier(num_barriers=slots, num_arrivals=num_arrivals)
        free = plgpu.Barrier(num_barriers=slots, num_arrivals=readers)
        return Stream(swizzled((slots, BLOCK, width), dtype, columns), ready, free)

    # A product of P or dS has BLOCK terms: its operands are laid out in rows of as many columns.
    kinds = [jnp.float32] * 2 if of_keys else [jnp.int32] * 2
    kinds += [jnp.int32] if window is not None else []
    arrivals = 1 + len(kinds)
    if of_scores:
        pairs = stream(CHUNKS, CHUNK, None, 1, 1)
    else:
        pairs = stream(STAGES, WIDTH, BLOCK, 1, WARPGROUPS)
    rows = (ROWS, WIDTH)
    return Scratch(
        rows=swizzled(rows, dtype, BLOCK if of_scores else None),
        rows_pair=swizzled(rows, dtype) if of_scores else None,
        weights=swizzled((ROWS, BLOCK), dtype, BLOCK) if of_scores else None,
        other_rows=stream(STAGES, WIDTH, BLOCK if of_scores else None, arrivals, WARPGROUPS),
        other_rows_pair=pairs,
        numbers=tuple(plgpu.SMEM((STAGES, BLOCK), kind) for kind in kinds),
        ready=plgpu.Barrier(num_barriers=2),
        handed=plgpu.Barrier(num_barriers=2) if of_scores else None,
        met=None if of_scores else plgpu.Barrier(num_arrivals=WARPGROUPS),
    )


class RowStats(NamedTuple):
    """Numbers of a thread block's rows, in registers: since and until, or lse and delta."""

    first: jax.Array
    second: jax.Array
    positions: jax.Array | None


class RowTile(NamedTuple):
    """A thread block's rows, and its way through the other side: all blocks of the tile's list, for
    keys once for each query head."""

    queries: Queries
    keys: Keys
    smem: Scratch
    settings: Settings
    of_keys: bool
    tile: jax.Array
    row: jax.Array
    first: jax.Array
    """Of the rows."""
    head: jax.Array
    """Theirs."""
    share: jax.Array
    """Of a key head's query heads, which several thread blocks may share."""
    other_head: jax.Array
    """The other side's; for keys, the first of their share."""
    count: jax.Array
    """Blocks in the tile's list."""
    steps: jax.Array

    @property
    def rows(self):
        return pl.ds(self.first, ROWS)

    def code(self, step):
        """Code of a step; past either end, that of the last or first."""
        step = lax.max(lax.min(step, self.steps - 1), 0)
        return self.keys.lists.codes[self.tile, lax.rem(step, lax.max(self.count, 1))]

    def load_rows(self, group) -> RowStats:
        """Ask for a compute warpgroup's own rows: keys or queries for the first, values or dO for
        the second if there are any. Returns what the masks and weights need of them."""
        smem, source = self.smem, (self.row, self.rows, self.head)
        moved = gpu_tiles.is_moved(self.keys, self.row)
        names = ("k", "v") if self.of_keys else ("q", "d_out")
        for i, target in enumerate((smem.rows, smem.rows_pair)):
            if target is not None:

                @pl.when(group == i)
                def _(i=i, target=target):
                    self.copy(moved, names[i], source, target, smem.ready.at[i])

        def of_rows(ref):
            layout = plgpu.Layout.WGMMA.reduce(1)
            return plgpu.load(ref, layout=layout, optimized=False)

        queries, keys = self.queries, self.keys
        by_row, positions = (self.row, self.rows), None
        if self.of_keys:
            first, second, positions_ref = (
                keys.since.at[by_row],
                keys.until.at[by_row],
                keys.positions,
            )
        else:
            by_head = (self.row, self.head, self.rows)
            first, second, positions_ref = (
                queries.lse.at[by_head],
                queries.delta.at[by_head],
                keys.query_positions,
            )
        if self.settings.window is not None:
            positions = of_rows(positions_ref.at[by_row])
        return RowStats(of_rows(first), of_rows(second), positions)

    def copy(self, moved, name, source, target, ready):
        if name in ("k", "v"):
            gpu_tiles.copy_block(moved, self.keys, name, source, target, ready)
        else:
            plgpu.copy_gmem_to_smem(getattr(self.queries, name).at[source], target, ready)

    def across(self, x):
        """A number of each row for all of its scores."""
        return lax.broadcast_in_dim(x, (ROWS, BLOCK), [0])

    def along(self, index, slot):
        """A number of each of the other side's rows."""
        layout = plgpu.Layout.WGMMA.reduce(0)
        value = plgpu.load(self.smem.numbers[index].at[slot], layout=layout)
        return lax.broadcast_in_dim(value, (ROWS, BLOCK), [1])

    def weights(self, score, code, slot, row_stats: RowStats):
        """Return P of raw scores, and its `Settings.slope`."""
        settings = self.settings
        lse = self.along(0, slot) if self.of_keys else self.across(row_stats.first)
        score = settings.capped(score)
        weight = jnp.exp2(score * settings.logit_scale - lse)

        def masked():
            query = plgpu.broadcasted_iota(
                jnp.int32, (ROWS, BLOCK), 1 if self.of_keys else 0, layout=plgpu.Layout.WGMMA
            )
            if self.of_keys:
                query += lax.shift_right_logical(code, 1) * BLOCK
                since, until = self.across(row_stats.first), self.across(row_stats.second)
            else:
                query += self.first
                since, until = self.along(0, slot), self.along(1, slot)
            seen = (query >= since) & (query < until)
            if settings.window is not None:
                row_position, other_position = self.across(row_stats.positions), self.along(2, slot)
                distance = (
                    other_position - row_position if self.of_keys else row_position - other_position
                )
                seen &= distance < settings.window
            return jnp.where(seen, weight, 0.0)

        weight = lax.cond((code & 1) == 1, masked, lambda: weight)
        return weight, settings.slope(weight, score)

    def send_part(self, result, ref, columns):
        """Write a share's part of a gradient, in float32."""
        ref[self.share, self.row, self.rows, self.head, columns] = result

    def serve(self):
        """Run the memory warpgroup: load each step's blocks into free slots."""
        plgpu.set_max_registers(MEMORY_REGISTERS, action="decrease")
        smem, queries, keys = self.smem, self.queries, self.keys
        moved = gpu_tiles.is_moved(keys, self.row)
        other_rows, pairs = smem.other_rows, smem.other_rows_pair
        names = ("q", "d_out") if self.of_keys else ("k", "v")

        def step(i, code):
            next_code, head = self.code(i + 1), self.other_head
            if self.of_keys:
                head += lax.div(i, lax.max(self.count, 1))
            rows = pl.ds(pl.multiple_of(lax.shift_right_logical(code, 1) * BLOCK, BLOCK), BLOCK)
            source_rows, by_row = (self.row, rows, head), (self.row, rows)
            slot = other_rows.slot(i)

            @pl.when(i >= other_rows.slots)
            def _():
                plgpu.barrier_wait(other_rows.free.at[slot])

            ready = other_rows.ready.at[slot]
            self.copy(moved, names[0], source_rows, other_rows.blocks.at[slot], ready)
            if self.of_keys:
                of_query = (self.row, head, rows)
                numbers = [queries.lse.at[of_query], queries.delta.at[of_query]]
                positions = keys.query_positions
            else:
                numbers = [keys.since.at[by_row], keys.until.at[by_row]]
                positions = keys.positions
            if self.settings.window is not None:
                numbers.append(positions.at[by_row])
            for source, target in zip(numbers, smem.numbers, strict=True):
                plgpu.copy_gmem_to_smem(source, target.at[slot], ready)

            for chunk in range(pairs.chunks):
                number = i * pairs.chunks + chunk
                slot = pairs.slot(number)

                @pl.when(number >= pairs.slots)
                def _(slot=slot):
                    plgpu.barrier_wait(pairs.free.at[slot])

                part = (
                    source_rows
                    if pairs.chunks == 1
                    else (*source_rows, pl.ds(chunk * CHUNK, CHUNK))
                )
                target, ready = pairs.blocks.at[slot], pairs.ready.at[slot]
                self.copy(moved, names[1], part, target, ready)
            return next_code

        lax.fori_loop(0, self.steps, step, self.code(0))
        for stream in (other_rows, pairs):  # leave no barrier phase unobserved
            total = self.steps * stream.chunks

            @pl.loop(lax.max(total - stream.slots, 0), total)
            def _(i, stream=stream):
                plgpu.barrier_wait(stream.free.at[stream.slot(i)])


def anew() -> pl.Slice:
    """Return all rows of a buffer, as an operand of wgmma whose address is computed where it is
    used: all ahead of a loop they spill."""
    return pl.ds(pl.multiple_of(opaque(jnp.int32(0)), ROWS), ROWS)


def shares(queries: Queries, keys: Keys) -> int:
    """Thread blocks that share the query heads of a key head: a short row of few key heads has too
    few tiles of keys for all multiprocessors, and one for each ends with the longest tile."""
    (B, S, K, _), N = keys.k.shape, queries.q.shape[2]
    tiles, heads = B * S // ROWS * K, N // K
    enough = [n for n in range(1, heads) if heads % n == 0 and n * tiles >= ENOUGH * num_cores()]
    return min(enough, default=heads)


def begin(
    queries: Queries, keys: Keys, smem: Scratch, settings: Settings, of_keys: bool, parts: int
) -> RowTile:
    """The tile of this thread block: those of the same rows follow each other, a head each, or for
    keys one of `parts` shares of a head."""
    (T, N), (S, K) = queries.q.shape[1:3], keys.k.shape[1:3]
    own_heads, tiles = (K * parts, S // ROWS) if of_keys else (N, T // ROWS)
    program, heads = lax.axis_index("program"), N // K
    tile = keys.lists.order[lax.div(program, jnp.int32(own_heads))]
    row, index = lax.div(tile, jnp.int32(tiles)), lax.rem(tile, jnp.int32(tiles))
    head, count = lax.rem(program, jnp.int32(own_heads)), keys.lists.counts[tile]
    first = pl.multiple_of(index * ROWS, ROWS)
    share, other_rows, steps = jnp.int32(0), lax.div(head, jnp.int32(heads)), count
    if of_keys:
        shared_heads = heads // parts
        other_rows, steps = head * shared_heads, count * shared_heads
        share, head = lax.rem(head, jnp.int32(parts)), lax.div(head, jnp.int32(parts))
    fields = (tile, row, first, head, share, other_rows, count, steps)
    return RowTile(queries, keys, smem, settings, of_keys, *fields)


def run(kernel, name: str, out, scratch: Scratch, queries: Queries, keys: Keys, parts: int = 1):
    """A kernel over 64 rows of what is like `out`; of several parts, their sum."""
    B, length, heads, _ = out.shape
    kind = out if parts == 1 else jax.ShapeDtypeStruct((parts, *out.shape), jnp.float32)
    value = launch(
        kernel,
        name,
        jax.ShapeDtypeStruct(kind.shape, kind.dtype),
        [scratch],
        [queries, keys],
        grid={"program": B * length // ROWS * heads * parts},
        warpgroups=WARPGROUPS,
    )
    return value if parts == 1 else value.sum(0).astype(out.dtype)


def dv(queries: Queries, keys: Keys, settings: Settings) -> jax.Array:
    """dV [B, S, K, WIDTH] in the blocks' order; `keys.lists` has blocks of `BLOCK` queries for
    tiles of `ROWS` keys."""
    dtype, parts = keys.v.dtype, shares(queries, keys)

    def kernel(queries: Queries, keys: Keys, dv_ref, smem: Scratch):
        group = lax.axis_index("group")
        tile = begin(queries, keys, smem, settings, True, parts)
        other_rows, pairs = smem.other_rows, smem.other_rows_pair
        columns = pl.ds(pl.multiple_of(group * COLUMNS, COLUMNS), COLUMNS)

        def meet():
            plgpu.barrier_arrive(smem.met)
            plgpu.barrier_wait(smem.met)

        @pl.when(group < WARPGROUPS)
        def compute():
            plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
            row_stats = tile.load_rows(group)
            plgpu.barrier_wait(smem.ready.at[0])

            def accumulate(acc):
                def step(i, code):
                    next_code, slot = tile.code(i + 1), other_rows.slot(i)
                    plgpu.barrier_wait(other_rows.ready.at[slot])

                    def scores(ref):
                        block = other_rows.blocks.at[opaque(slot)]
                        plgpu.wgmma(ref, smem.rows.at[anew()], block.transpose((1, 0)))
                        return ref[...]  # dV of the step before is done, too

                    score = pl.run_scoped(scores, plgpu.ACC((ROWS, BLOCK), jnp.float32))

                    @pl.when(i > 0)
                    def _():
                        plgpu.barrier_arrive(pairs.free.at[pairs.slot(i - 1)])

                    weight, _ = tile.weights(score, code, slot, row_stats)
                    plgpu.commit_smem()  # what TMA overwrites has been read
                    plgpu.barrier_arrive(other_rows.free.at[slot])
                    plgpu.barrier_wait(pairs.ready.at[slot])
                    d_out = pairs.blocks.at[opaque(slot), :, columns]
                    plgpu.wgmma(acc, weight.astype(dtype), d_out)
                    return next_code

                lax.fori_loop(0, tile.steps, step, tile.code(0))
                result = acc[...]

                @pl.when(tile.steps > 0)
                def _():
                    plgpu.barrier_arrive(pairs.free.at[pairs.slot(tile.steps - 1)])

                return result

            result = pl.run_scoped(accumulate, plgpu.ACC((ROWS, COLUMNS), jnp.float32))
            if parts > 1:
                tile.send_part(result, dv_ref, columns)
                return
            meet()  # the keys are used up: their buffer takes the result
            smem.rows[:, columns] = result.astype(dtype)
            plgpu.commit_smem()
            meet()

            @pl.when(group == 0)
            def _():
                target = dv_ref.at[tile.row, tile.rows, tile.head]
                plgpu.copy_smem_to_gmem(smem.rows, target)
                plgpu.wait_smem_to_gmem(0)

        pl.when(group == WARPGROUPS)(tile.serve)

    scratch = make_scratch(True, False, settings.window, dtype)
    return run(kernel, "tree_attention_dv", keys.v, scratch, queries, keys, parts)


def dk(queries: Queries, keys: Keys, settings: Settings) -> jax.Array:
    """dK [B, S, K, WIDTH]; as `dv`."""
    return _of_scores("tree_attention_dk", queries, keys, settings, of_keys=True)


def dq(queries: Queries, keys: Keys, settings: Settings) -> jax.Array:
    """dQ [B, T, N, WIDTH]; `keys.lists` has blocks of `BLOCK` keys for tiles of `ROWS` queries."""
    return _of_scores("tree_attention_dq", queries, keys, settings, of_keys=False)


def _of_scores(name: str, queries: Queries, keys: Keys, settings: Settings, of_keys: bool):
    out = keys.k if of_keys else queries.q
    dtype, parts = out.dtype, shares(queries, keys) if of_keys else 1

    def kernel(queries: Queries, keys: Keys, out_ref, smem: Scratch):
        group = lax.axis_index("group")
        tile = begin(queries, keys, smem, settings, of_keys, parts)
        other_rows, pairs = smem.other_rows, smem.other_rows_pair
        with_p, with_ds = smem.handed.at[0], smem.handed.at[1]

        def give_back(step):
            """The block of a step, behind whose product one more is in the queue."""
            plgpu.wgmma_wait(1)

            @pl.when(step >= 0)
            def _():
                plgpu.barrier_arrive(other_rows.free.at[other_rows.slot(step)])

        def weigh(row_stats, acc):
            """The first warpgroup: P, and half of the columns."""

            def step(i, code):
                next_code, slot = tile.code(i + 1), other_rows.slot(i)
                plgpu.barrier_wait(other_rows.ready.at[slot])

                def scores(ref):
                    block = other_rows.blocks.at[opaque(slot)]
                    for part in (pl.ds(0, CHUNK), pl.ds(CHUNK, WIDTH - CHUNK)):
                        right = block.at[:, part].transpose((1, 0))
                        plgpu.wgmma(ref, smem.rows.at[anew(), part], right)
                        if part.start == 0:
                            give_back(i - 1)
                    return ref[...]

                score = pl.run_scoped(scores, plgpu.ACC((ROWS, BLOCK), jnp.float32))
                _, slope = tile.weights(score, code, slot, row_stats)
                smem.weights[...] = slope.astype(dtype)
                plgpu.commit_smem()  # and what TMA overwrites has been read
                plgpu.barrier_arrive(with_p)
                plgpu.barrier_wait(with_ds)
                plgpu.wgmma(
                    acc, smem.weights.at[anew()], other_rows.blocks.at[opaque(slot), :, :COLUMNS]
                )
                return next_code

            lax.fori_loop(0, tile.steps, step, tile.code(0))

        def differentiate(row_stats, acc):
            """The second: dS, and the other half."""

            def step(i, _):
                slot = other_rows.slot(i)

                def d_weights(ref):
                    for chunk in range(pairs.chunks):
                        number = i * pairs.chunks + chunk
                        pair_slot = pairs.slot(number)
                        plgpu.barrier_wait(pairs.ready.at[pair_slot])
                        part = pl.ds(chunk * CHUNK, CHUNK)
                        block = pairs.blocks.at[opaque(pair_slot)]
                        plgpu.wgmma(ref, smem.rows_pair.at[anew(), part], block.transpose((1, 0)))
                        if chunk == 0:
                            give_back(i - 1)
                        else:
                            plgpu.wgmma_wait(1)
                            plgpu.barrier_arrive(pairs.free.at[pairs.slot(number - 1)])
                    value = ref[...]
                    plgpu.barrier_arrive(pairs.free.at[pair_slot])
                    return value

                d_weight = pl.run_scoped(d_weights, plgpu.ACC((ROWS, BLOCK), jnp.float32))
                plgpu.barrier_wait(other_rows.ready.at[slot])
                delta = tile.along(1, slot) if of_keys else tile.across(row_stats.second)
                plgpu.barrier_wait(with_p)
                slope = plgpu.load(smem.weights, layout=plgpu.Layout.WGMMA)
                d_score = (slope.astype(jnp.float32) * (d_weight - delta)).astype(dtype)
                smem.weights[...] = d_score
                plgpu.commit_smem()
                plgpu.barrier_arrive(with_ds)
                plgpu.wgmma(acc, d_score, other_rows.blocks.at[opaque(slot), :, COLUMNS:])
                return 0

            lax.fori_loop(0, tile.steps, step, 0)

        def compute(rows_index, work, buffer):
            plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
            row_stats = tile.load_rows(group)
            plgpu.barrier_wait(smem.ready.at[rows_index])

            def accumulate(acc):
                work(row_stats, acc)
                result = acc[...]

                @pl.when(tile.steps > 0)
                def _():
                    plgpu.barrier_arrive(other_rows.free.at[other_rows.slot(tile.steps - 1)])

                return result

            result = pl.run_scoped(accumulate, plgpu.ACC((ROWS, COLUMNS), jnp.float32))
            result *= settings.scale
            columns = pl.ds(rows_index * COLUMNS, COLUMNS)
            if parts > 1:
                tile.send_part(result, out_ref, columns)
                return
            buffer[:, :COLUMNS] = result.astype(dtype)  # its rows are used up
            plgpu.commit_smem()
            for i in range(0, ROWS, 8):  # what of some of a buffer's columns lies in one piece
                target = out_ref.at[tile.row, pl.ds(tile.first + i, 8), tile.head, columns]
                plgpu.copy_smem_to_gmem(buffer.at[pl.ds(i, 8), :COLUMNS], target)
            plgpu.wait_smem_to_gmem(0)

        pl.when(group == 0)(lambda: compute(0, weigh, smem.rows))
        pl.when(group == 1)(lambda: compute(1, differentiate, smem.rows_pair))
        pl.when(group == WARPGROUPS)(tile.serve)

    scratch = make_scratch(of_keys, True, settings.window, dtype)
    return run(kernel, name, out, scratch, queries, keys, parts)
