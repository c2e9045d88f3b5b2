"""dK and dV of tree attention for Hopper, Pallas Mosaic GPU; dQ is made in gpu_dq.py.

Deterministic: no two thread blocks add to the same number. Given the base-2 log-sum-exp and
delta = rowsum(dO O), P = 2^(S - lse) and dS = P (dO V' - delta); dV is the sum of P' dO and dK that
of dS' Q over the queries.

A thread block owns 2 x 64 keys of one key head and loops over the query blocks in the tile's list,
for every query head of that key head. Scores are held transposed (rows are keys), so each thread's
intervals are loop invariants and grouped heads add up in registers. At head dim 256 both
accumulators of 64 keys do not fit the registers of one warpgroup: there the two warpgroups share 64
keys, each accumulates half of the columns, and both compute the scores.

One step of a compute warpgroup; wgmma runs behind the instructions, in the order of its queue:

    S' = K Q'          waits for Q; then dK of the step before is done, too, and its Q is given back
    P' = 2^(S' - lse)  while nothing multiplies
    dP' = V dO'        waits for dO
    dV += P' dO        still runs while
    dS' = P' (dP' - delta)
    dK += dS' Q        still runs in the next step: its Q is given back one step late

At dims of 192 and 128 the accumulators of a warpgroup's own 64 keys are 160 of each thread's 240
registers. What is left holds dP' beside one copy of P', in low precision, or ptxas lets no two
wgmma run at once. So dS' is made of that copy, and dV += P' dO is queued ahead of dP'.
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
    """Sizes of the kernel."""

    q_block: int = 64
    """Queries per step."""
    q_stages: int = 2
    """Steps whose queries are in flight; more than one, for a slot is released one step late."""
    compute_registers: int = 240
    memory_registers: int = 24  # 2 x 240 + 24 fill the register file: with 40 the launch hangs


def heuristic(head_dim: int) -> Config:
    return Config()


def key_tile(head_dim: int) -> int:
    """Keys of a thread block."""
    return ROWS if head_dim == 256 else TILE


class Scratch(NamedTuple):
    """Shared memory of a thread block, and its barriers; slots of queries are a ring."""

    k: jax.Ref
    """[key_tile, H]: keys, and in the end dK."""
    v: jax.Ref
    """[key_tile, V]: values, and in the end dV."""
    q: jax.Ref
    """[q_stages * q_block, H]."""
    d_out: jax.Ref
    """[q_stages * q_block, V]."""
    lse: jax.Ref
    """[q_stages, q_block], and positions the same."""
    delta: jax.Ref
    """[q_stages, q_block]; behind it may be as much for another number: every buffer begins at a
    multiple of 1,024 bytes."""
    positions: jax.Ref | None
    kv_ready: jax.Ref
    """One for each half of the keys."""
    q_ready: jax.Ref
    """Q has come, and with it lse, delta and positions."""
    d_out_ready: jax.Ref
    q_free: jax.Ref
    d_out_free: jax.Ref
    """dO is not read any more, nor are lse, delta and positions."""
    finished: jax.Ref
    """Both compute warpgroups have come here."""


def make_scratch(
    dims: tuple[int, int], dtype, window: int | None, config: Config, extra_numbers: int = 0
) -> Scratch:
    """dims: of keys and of values; extra_numbers: further numbers of each query, which come with
    Q."""
    stages, block = config.q_stages, config.q_block
    per_query = plgpu.SMEM((stages, block), jnp.float32)
    free = plgpu.Barrier(num_barriers=stages, num_arrivals=WARPGROUPS)
    tile = key_tile(dims[0])
    k, v = (swizzled((tile, dim), dtype) for dim in dims)
    q, d_out = (swizzled((stages * block, dim), dtype) for dim in dims)
    return Scratch(
        k=k,
        v=v,
        q=q,
        d_out=d_out,
        lse=per_query,
        delta=plgpu.SMEM(((1 + extra_numbers) * stages, block), jnp.float32),
        positions=None if window is None else plgpu.SMEM((stages, block), jnp.int32),
        kv_ready=plgpu.Barrier(num_barriers=WARPGROUPS, num_arrivals=2),  # K and V
        # One arrival for each copy: Q, lse, delta and, with a window, positions.
        q_ready=plgpu.Barrier(
            num_barriers=stages, num_arrivals=(3 if window is None else 4) + extra_numbers
        ),
        d_out_ready=plgpu.Barrier(num_barriers=stages),
        q_free=free,
        d_out_free=free,
        finished=plgpu.Barrier(num_arrivals=WARPGROUPS),
    )


class KeyShare(NamedTuple):
    """The 64 keys of a compute warpgroup."""

    rows: pl.Slice
    """Where they are in the row of the batch."""
    first: jax.Array | int
    """The first of them in the thread block's buffers."""
    held: pl.Slice
    columns: pl.Slice | slice
    """Of dK and dV, that the warpgroup adds up."""
    since: jax.Array
    """[64] in registers, as until and positions."""
    until: jax.Array
    positions: jax.Array | None


class Step(NamedTuple):
    """A block of queries of one head, which a compute warpgroup multiplies with its keys."""

    i: jax.Array
    code: jax.Array
    slot: jax.Array
    part: pl.Slice
    """The slot's queries in the buffers."""
    first: jax.Array
    """Index of the first of them in the row."""
    lse: jax.Ref
    """Of those queries, as delta."""
    delta: jax.Ref
    k: jax.Ref | jax.Array
    v: jax.Ref | jax.Array


class KeyTile(NamedTuple):
    """A thread block's keys, and its way through the queries: all blocks of the tile's list for the
    first query head of the key head, then for the next."""

    queries: Queries
    keys: Keys
    smem: Scratch
    settings: Settings
    config: Config
    heads: int
    """Query heads of a key head."""
    tile: jax.Array
    row: jax.Array
    index: jax.Array
    """Of the tile in its row."""
    kv_head: jax.Array
    count: jax.Array
    """Blocks in its list."""
    steps: jax.Array

    @property
    def tight(self) -> bool:
        """True if registers hold P in low precision only."""
        return self.keys.k.shape[-1] == 192

    def slot(self, step):
        return lax.rem(step, jnp.int32(self.config.q_stages))

    def part(self, step):
        return pl.ds(self.slot(step) * self.config.q_block, self.config.q_block)

    def code(self, step):
        """Code of a step; past either end, that of the last or first."""
        step = lax.max(lax.min(step, self.steps - 1), 0)
        return self.keys.lists.codes[self.tile, lax.rem(step, lax.max(self.count, 1))]

    def head(self, step):
        return self.kv_head * self.heads + lax.div(lax.max(step, 0), lax.max(self.count, 1))

    def load_keys(self, group, shared: bool) -> KeyShare:
        """A compute warpgroup fetches its own keys, or the first of them what both share."""
        smem, keys = self.smem, self.keys
        if shared:
            rows, held, ready = pl.ds(self.index * ROWS, ROWS), pl.ds(0, ROWS), smem.kv_ready.at[0]
        else:
            rows = pl.ds(self.index * TILE + group * ROWS, ROWS)
            held, ready = pl.ds(group * ROWS, ROWS), smem.kv_ready.at[group]

        @pl.when(group == 0 if shared else True)
        def _():
            # Each warpgroup waits for its own half of the keys only.
            moved, source = gpu_tiles.is_moved(keys, self.row), (self.row, rows, self.kv_head)
            gpu_tiles.copy_block(moved, keys, "k", source, smem.k.at[held], ready)
            gpu_tiles.copy_block(moved, keys, "v", source, smem.v.at[held], ready)

        def of_rows(ref):
            layout = plgpu.Layout.WGMMA.reduce(1)  # that of rows of scores: no exchange is needed
            return plgpu.load(ref.at[self.row, rows], layout=layout, optimized=False)

        first = 0 if shared else group * ROWS
        width = keys.k.shape[-1] // WARPGROUPS
        columns = pl.ds(group * width, width) if shared else slice(None)
        since, until = of_rows(keys.since), of_rows(keys.until)
        positions = None if self.settings.window is None else of_rows(keys.positions)
        plgpu.barrier_wait(ready)
        return KeyShare(rows, first, held, columns, since, until, positions)

    def enter(self, i, code, key_share: KeyShare) -> Step:
        """Wait for a step's queries."""
        plgpu.barrier_wait(self.smem.q_ready.at[self.slot(i)])
        return self.at(i, code, key_share)

    def at(self, i, code, key_share: KeyShare) -> Step:
        """A step whose queries were waited for."""
        slot, part = self.slot(i), self.part(i)
        first = lax.shift_right_logical(code, 1) * self.config.q_block
        # Opaque, or the addresses of wgmma's operands are computed ahead of the loop and spill.
        share_rows = pl.ds(pl.multiple_of(opaque(jnp.int32(key_share.first)), ROWS), ROWS)
        lse, delta, k, v = self.smem.lse, self.smem.delta, self.smem.k, self.smem.v
        numbers = lse.at[slot], delta.at[slot]
        return Step(i, code, slot, part, first, *numbers, k.at[share_rows], v.at[share_rows])

    def give_back_queries(self, i):
        """Release the queries of a step whose dK is done; nothing before the first step."""

        @pl.when(i >= 0)
        def _():
            plgpu.barrier_arrive(self.smem.q_free.at[self.slot(i)])

    def weights(self, score, step: Step, key_share: KeyShare):
        """Return P of raw scores in low precision, and dS / (dP - delta)."""
        settings, smem, shape = self.settings, self.smem, (ROWS, step.part.size)
        wgmma = plgpu.Layout.WGMMA

        def column(x):
            return lax.broadcast_in_dim(x, shape, [1])

        def across(x):
            return lax.broadcast_in_dim(x, shape, [0])

        lse = plgpu.load(step.lse, layout=wgmma.reduce(0))
        score = settings.capped(score)
        weight = jnp.exp2(score * settings.logit_scale - column(lse))

        def masked():
            q_index = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=wgmma)
            q_index += step.first
            seen = (q_index >= across(key_share.since)) & (q_index < across(key_share.until))
            if settings.window is not None:
                position = plgpu.load(smem.positions.at[step.slot], layout=wgmma.reduce(0))
                seen &= column(position) - across(key_share.positions) < settings.window
            return jnp.where(seen, weight, 0.0)

        weight = lax.cond((step.code & 1) == 1, masked, lambda: weight)
        low, slope = weight.astype(self.queries.q.dtype), settings.slope(weight, score)
        if self.tight:
            slope = low if settings.softcap is None else slope.astype(low.dtype)
        return low, slope

    def d_weights(self, low, dv, step: Step, key_share: KeyShare, first: bool = True):
        """dP' = V dO', and behind it, still running on return, dV += P' dO; if `tight`, dV first,
        and both are done. first: of the step's parts, which waits for dO."""
        smem = self.smem

        def multiply(ref):
            if first:
                plgpu.barrier_wait(smem.d_out_ready.at[step.slot])
            if self.tight:
                plgpu.wgmma(dv, low, smem.d_out.at[step.part, key_share.columns])
                if self.settings.softcap is not None:
                    plgpu.wgmma_wait(0)  # P' makes room: dS' is made of another number
                plgpu.wgmma(ref, step.v, smem.d_out.at[step.part].transpose((1, 0)))
                return ref[...]
            plgpu.wgmma(ref, step.v, smem.d_out.at[step.part].transpose((1, 0)))
            plgpu.wgmma(dv, low, smem.d_out.at[step.part, key_share.columns])
            return plgpu.wgmma_accumulator_load(ref, wait_n=1)

        return pl.run_scoped(multiply, plgpu.ACC((ROWS, step.part.size), jnp.float32))

    def d_scores(self, slope, d_weight, step: Step):
        """dS', without the factor `scale`, in low precision."""
        layout = plgpu.Layout.WGMMA.reduce(0)
        delta = plgpu.load(step.delta, layout=layout)
        delta = lax.broadcast_in_dim(delta, (ROWS, step.part.size), [1])
        if self.tight:  # behind a barrier, or each number of P' is unpacked ahead of dP'
            slope = lax.optimization_barrier(slope).astype(jnp.float32)
        return (slope * (d_weight - delta)).astype(self.queries.q.dtype)

    def leave(self, ds, dk, step: Step, key_share: KeyShare):
        """Queue dK += dS' Q and give dO back; Q is given back a step later."""
        plgpu.wgmma(dk, ds, self.smem.q.at[step.part, key_share.columns])
        self.give_back_d_out(step)

    def give_back_d_out(self, step: Step):
        """Release dO of the step whose dK was queued last."""
        plgpu.wgmma_wait(1)  # dV has read dO; also orders reads of lse and delta
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.smem.d_out_free.at[step.slot])

    def meet(self):
        """Wait for the other compute warpgroup."""
        plgpu.barrier_arrive(self.smem.finished)
        plgpu.barrier_wait(self.smem.finished)

    def hold_result(self, dk, dv, key_share: KeyShare):
        """Keys and values are used up: their buffers take the result."""
        dtype = self.queries.q.dtype
        self.smem.k[key_share.held, key_share.columns] = (dk * self.settings.scale).astype(dtype)
        self.smem.v[key_share.held, key_share.columns] = dv.astype(dtype)
        plgpu.commit_smem()

    def send_result(self, dk_ref, dv_ref, key_share: KeyShare):
        target = (self.row, key_share.rows, self.kv_head)
        plgpu.copy_smem_to_gmem(self.smem.k.at[key_share.held], dk_ref.at[target])
        plgpu.copy_smem_to_gmem(self.smem.v.at[key_share.held], dv_ref.at[target])

    def serve(self, extra_numbers=None):
        """Run the memory warpgroup: load each step's queries into a free slot.
        extra_numbers: float32 [B, N, T], which goes behind delta."""
        plgpu.set_max_registers(self.config.memory_registers, action="decrease")
        smem, queries, stages = self.smem, self.queries, self.config.q_stages
        block, row = self.config.q_block, self.row

        def step(i, code):
            next_code = self.code(i + 1)
            slot, part = self.slot(i), self.part(i)
            head = self.head(i)
            first = pl.multiple_of(lax.shift_right_logical(code, 1) * block, block)
            rows = pl.ds(first, block)

            @pl.when(i >= stages)
            def _():
                plgpu.barrier_wait(smem.q_free.at[slot])

            ready = smem.q_ready.at[slot]
            plgpu.copy_gmem_to_smem(queries.q.at[row, rows, head], smem.q.at[part], ready)

            @pl.when(i >= stages)  # also for lse and delta: they are read until dO is given back
            def _():
                plgpu.barrier_wait(smem.d_out_free.at[slot])

            numbers = [(queries.lse, smem.lse.at[slot]), (queries.delta, smem.delta.at[slot])]
            if extra_numbers is not None:
                numbers.append((extra_numbers, smem.delta.at[stages + slot]))
            for source, target in numbers:
                plgpu.copy_gmem_to_smem(source.at[row, head, rows], target, ready)
            if smem.positions is not None:
                source = self.keys.query_positions.at[row, rows]
                plgpu.copy_gmem_to_smem(source, smem.positions.at[slot], ready)
            source, ready = queries.d_out.at[row, rows, head], smem.d_out_ready.at[slot]
            plgpu.copy_gmem_to_smem(source, smem.d_out.at[part], ready)
            return next_code

        lax.fori_loop(0, self.steps, step, self.code(0))

        @pl.loop(lax.max(self.steps - stages, 0), self.steps)
        def _(i):  # leave no barrier phase unobserved
            plgpu.barrier_wait(smem.q_free.at[self.slot(i)])
            plgpu.barrier_wait(smem.d_out_free.at[self.slot(i)])


def begin(
    queries: Queries, keys: Keys, smem: Scratch, settings: Settings, config: Config
) -> KeyTile:
    """The tile of this thread block: those of one key tile follow each other, a key head each."""
    S, K, H = keys.k.shape[1:]
    heads, num_tiles = queries.q.shape[2] // K, S // key_tile(H)
    program = lax.axis_index("program")
    kv_head = lax.rem(program, jnp.int32(K))
    tile = keys.lists.order[lax.div(program, jnp.int32(K))]
    row, index = lax.div(tile, jnp.int32(num_tiles)), lax.rem(tile, jnp.int32(num_tiles))
    count = keys.lists.counts[tile]
    target = (tile, row, index, kv_head, count, count * heads)
    return KeyTile(queries, keys, smem, settings, config, heads, *target)


def dkv(
    queries: Queries, keys: Keys, settings: Settings, config: Config
) -> tuple[jax.Array, jax.Array]:
    """dK [B, S, K, H] and dV [B, S, K, V] in the blocks' order; `keys.lists` has query blocks of
    `config.q_block` for key tiles of `key_tile(H)`."""
    assert config.q_stages > 1, "a slot is released one step late"
    (B, S, K, H), V = keys.k.shape, keys.v.shape[-1]
    dtype, bq = queries.q.dtype, config.q_block
    shared = key_tile(H) == ROWS

    def kernel(queries: Queries, keys: Keys, dk_ref, dv_ref, smem: Scratch):
        group = lax.axis_index("group")
        tile = begin(queries, keys, smem, settings, config)

        @pl.when(group < WARPGROUPS)
        def compute():
            plgpu.set_max_registers(config.compute_registers, action="increase")
            key_share = tile.load_keys(group, shared)

            def accumulate(dk, dv):
                def step(i, code):
                    next_code = tile.code(i + 1)
                    current = tile.enter(i, code, key_share)

                    def scores(ref):
                        plgpu.wgmma(ref, current.k, smem.q.at[current.part].transpose((1, 0)))
                        return ref[...]  # waits for everything queued: dK of the step before, too

                    score = pl.run_scoped(scores, plgpu.ACC((ROWS, bq), jnp.float32))
                    tile.give_back_queries(i - 1)  # its dK, which ran behind, has read them
                    low, slope = tile.weights(score, current, key_share)
                    ds = tile.d_scores(slope, tile.d_weights(low, dv, current, key_share), current)
                    tile.leave(ds, dk, current, key_share)
                    return next_code

                lax.fori_loop(0, tile.steps, step, tile.code(0))
                result = dk[...], dv[...]

                tile.give_back_queries(tile.steps - 1)
                return result

            # Columns of dK and dV that a warpgroup owns.
            widths = [dim // WARPGROUPS if shared else dim for dim in (H, V)]
            accs = [plgpu.ACC((ROWS, width), jnp.float32) for width in widths]
            dk, dv = pl.run_scoped(accumulate, *accs)
            if shared:  # the other half of the columns comes from keys that this one overwrites
                tile.meet()
            tile.hold_result(dk, dv, key_share)
            if shared:  # one of them sends both halves
                tile.meet()
            pl.when(group == 0 if shared else True)(
                lambda: tile.send_result(dk_ref, dv_ref, key_share)
            )
            plgpu.wait_smem_to_gmem(0)

        pl.when(group == WARPGROUPS)(tile.serve)

    return tuple(
        launch(
            kernel,
            "tree_attention_dkv",
            [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (keys.k, keys.v)],
            [make_scratch((H, V), dtype, settings.window, config)],
            [queries, keys],
            grid={"program": B * S // key_tile(H) * K},
            warpgroups=WARPGROUPS,
        )
    )
