"""Grouped matmuls for Hopper, Pallas Mosaic GPU, on segments of whole blocks.

`product`: each block of rows times its expert's matrix, summed over several pairs of rows and
matrices (what a low-rank correction adds is one more pair: extra steps of the same loop).
`gated_product`: the same with two matrices at once, and the gated activation before anything is
stored. `gated_gradient`: its backward, a product whose epilogue needs what the forward stored.
`weight_gradient`: for each expert, the sum over its rows of x' dy.

All are persistent thread blocks: a memory warpgroup fills a ring of shared-memory stages by TMA and
runs ahead into the next tile; two compute warpgroups of 64 rows each empty it. Blocks of rows that
no expert uses are not touched: what lies there is undefined.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxtrain_kernels.grouped_matmul.ffn import Activation
from jaxtrain_kernels.mosaic import launch, num_cores, plgpu, swizzled, tanh

WARPGROUPS = 2  # that compute
ROWS = 64  # rows of a warpgroup: those of a wgmma
BLOCK = WARPGROUPS * ROWS  # rows of an expert's block: a tile never has two experts
DEPTH = 64  # of one step: 128 bytes of bfloat16, as wide as a swizzled row can be
STORE = 64  # columns stored at a time, for the same reason
LOG2E = 1.4426950408889634


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of a kernel."""

    columns: int = 256
    """Of a tile."""
    stages: int = 4
    snake: int = 8
    """Columns of tiles that are walked before the next blocks of rows: reuse in the L2 cache."""
    compute_registers: int = 232
    memory_registers: int = 40


COST = {256: 1.0, 192: 1.04, 128: 1.12}
"""What a column costs in tiles of so many: narrow ones read their rows more often."""


def fitting(columns: int) -> Config | None:
    """The sizes for a result of so many columns, None if there are none."""
    sizes = [size for size in COST if columns >= size and columns % STORE == 0]
    if not sizes:
        return None
    best = min(sizes, key=lambda size: COST[size] * size * pl.cdiv(columns, size))
    return Config(columns=best)


class StageRing:
    """The stages between the memory warpgroup and the compute warpgroups.

    Steps are counted over all tiles of a thread block, so that stages and barrier phases carry on
    from one tile to the next.
    """

    def __init__(self, ready, free, config: Config):
        self.ready, self.free, self.config = ready, free, config

    def slot(self, step):
        return lax.rem(step, jnp.int32(self.config.stages))

    def run(self, num_tiles, steps_of, load, compute):
        """`load(tile, step)` and `compute(tile, step)` for every tile of this thread block; step
        is the first of the `steps_of(tile)` that the tile takes."""
        config, core, cores = self.config, lax.axis_index("core"), num_cores()
        # Tiles are dealt round-robin to thread blocks: those that run at one time share operands.
        count = lax.div(num_tiles - core + (cores - 1), jnp.int32(cores))

        def walk(body):
            def one(n, step):
                tile = core + n * cores
                body(tile, step)
                return step + steps_of(tile)

            return lax.fori_loop(0, count, one, jnp.int32(0))

        @pl.when(lax.axis_index("group") < WARPGROUPS)
        def _():
            # Registers move from the memory warpgroup, which needs few, to those that accumulate.
            plgpu.set_max_registers(config.compute_registers, action="increase")
            walk(compute)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        @pl.when(lax.axis_index("group") == WARPGROUPS)
        def _():
            plgpu.set_max_registers(config.memory_registers, action="decrease")
            total = walk(load)

            @pl.loop(lax.max(total - config.stages, 0), total)
            def _(step):  # leave no barrier phase unobserved
                plgpu.barrier_wait(self.free.at[self.slot(step)])

    def fill(self, first, count, copy):
        """`copy(i, slot, barrier)` for i in [0, count), each once its stage is free."""

        @pl.loop(0, count)
        def _(i):
            step = first + i
            slot = self.slot(step)

            @pl.when(step >= self.config.stages)
            def _():
                plgpu.barrier_wait(self.free.at[slot])

            copy(i, slot, self.ready.at[slot])

    def empty(self, first, count, multiply, in_flight: int = 1):
        """`multiply(slot)` starts `in_flight` matmuls for each step; a stage is given back when the
        next step's have started."""

        @pl.loop(0, count)
        def _(i):
            slot = self.slot(first + i)
            plgpu.barrier_wait(self.ready.at[slot])
            multiply(slot)
            # Matmuls end in the order of their start: with only this step's left, those of the step
            # before have read their stage.
            plgpu.wgmma_wait(in_flight)

            @pl.when(i > 0)
            def _():
                plgpu.barrier_arrive(self.free.at[self.slot(first + i - 1)])

        plgpu.wgmma_wait(0)

        @pl.when(count > 0)
        def _():
            plgpu.barrier_arrive(self.free.at[self.slot(first + count - 1)])


def _part(start, size: int):
    return pl.ds(pl.multiple_of(start, size), size)


def _tile(column, size: int, total: int):
    """Columns of a tile. The last one ends with the matrix, and so may begin within the one before;
    what that has stored it does not store again (`_fresh`)."""
    start = column * size
    if total % size:
        start = lax.min(start, jnp.int32(total - size))
    return pl.ds(pl.multiple_of(start, STORE), size)


def _fresh(start, tile, size: int, total: int):
    """True if no earlier tile has stored the columns from `start` on; None if tiles do not
    overlap."""
    return start >= tile * size if total % size else None


def _all_of(first, second):
    return second if first is None else first & second


def _warpgroup_rows(slot, size: int = BLOCK):
    """The rows of this warpgroup in a stage of a buffer [stages * size, ...]."""
    return _part(slot * size + lax.axis_index("group") * ROWS, ROWS)


def _walk(across: int, snake: int, blocks):
    """tile -> (block, column): panels of up to `snake` columns, every second one backwards; the
    last may be narrower."""
    panels = pl.cdiv(across, snake)
    width = pl.cdiv(across, panels)
    last = across - width * (panels - 1)

    def place(tile):
        panel = lax.min(lax.div(tile, blocks * width), jnp.int32(panels - 1))
        rest = tile - panel * (blocks * width)
        group_width = jnp.int32(width)
        if last != width:
            group_width = lax.select(panel == panels - 1, jnp.int32(last), group_width)
        block = lax.div(rest, group_width)
        block = lax.select(lax.rem(panel, jnp.int32(2)) == 1, blocks - 1 - block, block)
        return block, panel * width + lax.rem(rest, group_width)

    return place


class Store:
    """Sends pieces [ROWS, STORE] in registers to memory through two buffers of each warpgroup."""

    def __init__(self, smem):
        self.smem, self.count = smem, 0

    def __call__(self, value, out_ref, row, column, fresh=None):
        """fresh: whether to send it at all; None: yes."""
        group, buffer = lax.axis_index("group"), self.count % 2
        # Of the copies under way only the latest may be unread: its buffer is the other one, but
        # for that of a tile before, which may have ended with either.
        plgpu.wait_smem_to_gmem(min(self.count, 1), wait_read_only=True)
        self.count += 1

        def send():
            self.smem[group, buffer] = value.astype(jnp.bfloat16)
            plgpu.commit_smem()
            rows = pl.ds(pl.multiple_of(row, ROWS), ROWS)
            target = out_ref.at[rows, pl.ds(pl.multiple_of(column, STORE), STORE)]
            plgpu.copy_smem_to_gmem(self.smem.at[group, buffer], target)

        send() if fresh is None else pl.when(fresh)(send)


def _launch(kernel, out_type, scratch, arrivals: int, config: Config, name: str, arrays):
    """A kernel whose scratch ends in the buffers of `Store` and the two barriers of `StageRing`;
    `arrivals` copies fill a stage."""
    scratch = [
        *scratch,
        swizzled((WARPGROUPS, 2, ROWS, STORE), jnp.bfloat16),
        plgpu.Barrier(num_barriers=config.stages, num_arrivals=arrivals),
        plgpu.Barrier(num_barriers=config.stages, num_arrivals=WARPGROUPS),
    ]
    grid = {"core": num_cores()}
    return launch(kernel, name, out_type, scratch, arrays, grid=grid, warpgroups=WARPGROUPS)


def _shape(*sizes, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(sizes, dtype)


def product(pairs, segments, *, transpose: bool, config: Config):
    """bfloat16 [P, F]: the sum over `pairs` of x [P, D] in blocks of 128 rows times its block's w
    [E, D, F] (or [E, F, D] transposed, read in place). D may differ between pairs."""
    xs, ws = zip(*pairs, strict=True)
    P, F = xs[0].shape[0], ws[0].shape[1 if transpose else 2]
    columns, across = config.columns, pl.cdiv(F, config.columns)
    depths = [x.shape[1] // DEPTH for x in xs]
    w_rows = columns if transpose else DEPTH

    def kernel(
        x_refs, w_refs, group_ref, active_ref, out_ref, x_smem, w_smem, out_smem, ready, free
    ):
        ring = StageRing(ready, free, config)
        group = lax.axis_index("group")
        used = active_ref[0]
        tile_of = _walk(across, config.snake, used)

        def load(tile, step):
            block, column = tile_of(tile)
            expert = group_ref[block]
            for x_ref, w_ref, depth in zip(x_refs, w_refs, depths, strict=True):

                def copy(d, slot, barrier, x_ref=x_ref, w_ref=w_ref):
                    inner, outer = _part(d * DEPTH, DEPTH), _tile(column, columns, F)
                    rows = _part(slot * BLOCK, BLOCK)
                    x_part = x_ref.at[_part(block * BLOCK, BLOCK), inner]
                    plgpu.copy_gmem_to_smem(x_part, x_smem.at[rows], barrier)
                    w_part = (outer, inner) if transpose else (inner, outer)
                    target = w_smem.at[_part(slot * w_rows, w_rows)]
                    plgpu.copy_gmem_to_smem(w_ref.at[expert].at[w_part], target, barrier)

                ring.fill(step, depth, copy)
                step += depth

        def compute(tile, step):
            block, column = tile_of(tile)

            @functools.partial(pl.run_scoped, acc=plgpu.ACC((ROWS, columns), jnp.float32))
            def _(acc):
                def multiply(slot):
                    right = w_smem.at[_part(slot * w_rows, w_rows)]
                    right = right.transpose((1, 0)) if transpose else right
                    plgpu.wgmma(acc, x_smem.at[_warpgroup_rows(slot)], right)

                ring.empty(step, sum(depths), multiply)
                value, store = acc[...], Store(out_smem)
                row, start_column = block * BLOCK + group * ROWS, _tile(column, columns, F).start
                for j in range(0, columns, STORE):
                    piece, fresh = (
                        value[:, j : j + STORE],
                        _fresh(start_column + j, column, columns, F),
                    )
                    store(piece, out_ref, row, start_column + j, fresh)

        ring.run(used * across, lambda tile: sum(depths), load, compute)

    scratch = [
        swizzled((config.stages * BLOCK, DEPTH), jnp.bfloat16),
        swizzled((config.stages * w_rows, DEPTH if transpose else columns), jnp.bfloat16),
    ]
    arrays = [xs, ws, segments.group, segments.active]
    return _launch(kernel, _shape(P, F), scratch, 2, config, "grouped_product", arrays)


def activate(x, activation: str):
    """(act(x), its slope) in float32; NotImplementedError for one that has no fused form."""
    match activation:
        case "silu" | "swish":
            sigmoid = 1.0 / (1.0 + jnp.exp2(x * -LOG2E))
            act = x * sigmoid
            return act, sigmoid + act * (1.0 - sigmoid)
        case "gelu_pytorch_tanh":
            root = 0.7978845608028654  # sqrt(2 / pi)
            t = tanh(root * (x + 0.044715 * x * x * x))
            inner = root * (1.0 + 3 * 0.044715 * x * x)
            return 0.5 * x * (1.0 + t), 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * inner
        case "relu":
            return jnp.maximum(x, 0.0), jnp.where(x > 0.0, 1.0, 0.0)
    raise NotImplementedError(f"no fused form of {activation}")


def gated(g, u, activation: Activation):
    """(h, dh/dg, dh/du) in float32 of an expert's hidden state h, without its gate."""
    if isinstance(activation, str):
        act, slope = activate(g, activation)
        return act * u, u * slope, act
    limit, alpha = activation
    low, held = jnp.minimum(g, limit), jnp.clip(u, -limit, limit)
    sigmoid = 1.0 / (1.0 + jnp.exp2(low * (-alpha * LOG2E)))
    act = low * sigmoid
    slope = jnp.where(g <= limit, sigmoid + alpha * act * (1.0 - sigmoid), 0.0)
    return (held + 1.0) * act, (held + 1.0) * slope, jnp.where(held == u, act, 0.0)


def gated_product(
    triples, biases, gates, segments, *, activation: Activation, save: bool, config: Config
):
    """hidden [P, F] = gates * act(gate) * up, and with `save` also (gate, up), all bfloat16.

    gate and up [P, F] are the sums over `triples` (x [P, D], w_gate [E, D, F], w_up [E, D, F]) of
    each block of x times its matrix, plus the two `biases` float32 [E, F], if there are any; gates
    float32 [P].
    """
    xs, w_gates, w_ups = zip(*triples, strict=True)
    P, F = xs[0].shape[0], w_gates[0].shape[2]
    half = config.columns // 2
    across = pl.cdiv(F, half)
    depths = [x.shape[1] // DEPTH for x in xs]
    per_row, across_rows = (plgpu.Layout.WGMMA.reduce(axis) for axis in (1, 0))
    plain = {"optimized": False}

    def kernel(x_refs, gate_refs, up_refs, bias_refs, gates_ref, group_ref, active_ref, *refs):
        *out_refs, x_smem, gate_smem, up_smem, out_smem, ready, free = refs
        ring = StageRing(ready, free, config)
        group = lax.axis_index("group")
        used = active_ref[0]
        tile_of = _walk(across, config.snake, used)

        def load(tile, step):
            block, column = tile_of(tile)
            expert = group_ref[block]
            for x_ref, gate_ref, up_ref, depth in zip(
                x_refs, gate_refs, up_refs, depths, strict=True
            ):

                def copy(d, slot, barrier, x_ref=x_ref, gate_ref=gate_ref, up_ref=up_ref):
                    inner, outer = _part(d * DEPTH, DEPTH), _tile(column, half, F)
                    rows = _part(slot * BLOCK, BLOCK)
                    x_part = x_ref.at[_part(block * BLOCK, BLOCK), inner]
                    plgpu.copy_gmem_to_smem(x_part, x_smem.at[rows], barrier)
                    target = _part(slot * DEPTH, DEPTH)
                    for ref, smem in ((gate_ref, gate_smem), (up_ref, up_smem)):
                        part = ref.at[expert].at[inner, outer]
                        plgpu.copy_gmem_to_smem(part, smem.at[target], barrier)

                ring.fill(step, depth, copy)
                step += depth

        def compute(tile, step):
            block, column = tile_of(tile)
            row, start_column = block * BLOCK + group * ROWS, _tile(column, half, F).start

            def biased(pieces, j):
                """With those of this tile's columns from j on."""
                if not bias_refs:
                    return pieces
                columns = _part(start_column + j, STORE)
                added = [
                    plgpu.load(ref.at[group_ref[block], columns], layout=across_rows, **plain)
                    for ref in bias_refs
                ]
                shape = (ROWS, STORE)
                return [
                    piece + lax.broadcast_in_dim(bias, shape, [1])
                    for piece, bias in zip(pieces, added, strict=True)
                ]

            @functools.partial(
                pl.run_scoped,
                gate_acc=plgpu.ACC((ROWS, half), jnp.float32),
                up_acc=plgpu.ACC((ROWS, half), jnp.float32),
            )
            def _(gate_acc, up_acc):
                def multiply(slot):
                    lhs = x_smem.at[_warpgroup_rows(slot)]
                    plgpu.wgmma(gate_acc, lhs, gate_smem.at[_part(slot * DEPTH, DEPTH)])
                    plgpu.wgmma(up_acc, lhs, up_smem.at[_part(slot * DEPTH, DEPTH)])

                ring.empty(step, sum(depths), multiply, in_flight=2)
                gate, up, store = gate_acc[...], up_acc[...], Store(out_smem)
                factor = plgpu.load(gates_ref.at[_part(row, ROWS)], layout=per_row, optimized=False)
                for j in range(0, half, STORE):
                    g, u = biased([gate[:, j : j + STORE], up[:, j : j + STORE]], j)
                    hidden = gated(g, u, activation)[0]
                    hidden *= lax.broadcast_in_dim(factor, (ROWS, STORE), [0])
                    for value, ref in zip((hidden, g, u), out_refs, strict=False):
                        store(
                            value,
                            ref,
                            row,
                            start_column + j,
                            _fresh(start_column + j, column, half, F),
                        )

        ring.run(used * across, lambda tile: sum(depths), load, compute)

    scratch = [
        swizzled((config.stages * BLOCK, DEPTH), jnp.bfloat16),
        swizzled((config.stages * DEPTH, half), jnp.bfloat16),
        swizzled((config.stages * DEPTH, half), jnp.bfloat16),
    ]
    arrays = [xs, w_gates, w_ups, biases, gates, segments.group, segments.active]
    out_type = [_shape(P, F)] * (3 if save else 1)
    return _launch(kernel, out_type, scratch, 3, config, "grouped_gated_product", arrays)


def gated_gradient(pairs, gate, up, gates, segments, *, activation: Activation, config: Config):
    """(d_gate [P, F], d_up [P, F] bfloat16, d_gates float32 [F / columns, P], to be summed).

    The gradient of hidden is the sum over `pairs` of dy [P, D] times w [E, F, D] transposed; gate,
    up and gates are those of `gated_product`. After a tile's last step, its pieces of gate and up
    come through the ring's buffers for dy and w.
    """
    dys, ws = zip(*pairs, strict=True)
    P, F = dys[0].shape[0], ws[0].shape[1]
    columns, across = config.columns, pl.cdiv(F, config.columns)
    depths = [dy.shape[1] // DEPTH for dy in dys]
    pieces = columns // STORE
    wgmma = plgpu.Layout.WGMMA
    per_row = wgmma.reduce(1)

    def kernel(dy_refs, w_refs, gate_ref, up_ref, gates_ref, group_ref, active_ref, *refs):
        d_gate_ref, d_up_ref, d_gates_ref, *refs = refs
        dy_smem, w_smem, sum_smem, out_smem, ready, free = refs
        ring = StageRing(ready, free, config)
        group = lax.axis_index("group")
        used = active_ref[0]
        tile_of = _walk(across, config.snake, used)

        def load(tile, step):
            block, column = tile_of(tile)
            expert = group_ref[block]
            rows = _part(block * BLOCK, BLOCK)
            for dy_ref, w_ref, depth in zip(dy_refs, w_refs, depths, strict=True):

                def copy(d, slot, barrier, dy_ref=dy_ref, w_ref=w_ref):
                    inner, outer = _part(d * DEPTH, DEPTH), _tile(column, columns, F)
                    target = dy_smem.at[_part(slot * BLOCK, BLOCK)]
                    plgpu.copy_gmem_to_smem(dy_ref.at[rows, inner], target, barrier)
                    target = w_smem.at[_part(slot * columns, columns)]
                    plgpu.copy_gmem_to_smem(w_ref.at[expert].at[outer, inner], target, barrier)

                ring.fill(step, depth, copy)
                step += depth

            def copy_piece(j, slot, barrier):
                part = _part(_tile(column, columns, F).start + j * STORE, STORE)
                for ref, smem, size in ((gate_ref, dy_smem, BLOCK), (up_ref, w_smem, columns)):
                    target = smem.at[pl.ds(pl.multiple_of(slot * size, ROWS), BLOCK)]
                    plgpu.copy_gmem_to_smem(ref.at[rows, part], target, barrier)

            ring.fill(step, pieces, copy_piece)

        def compute(tile, step):
            block, column = tile_of(tile)
            row, first = block * BLOCK + group * ROWS, _tile(column, columns, F).start

            @functools.partial(pl.run_scoped, acc=plgpu.ACC((ROWS, columns), jnp.float32))
            def _(acc):
                def multiply(slot):
                    right = w_smem.at[_part(slot * columns, columns)].transpose((1, 0))
                    plgpu.wgmma(acc, dy_smem.at[_warpgroup_rows(slot)], right)

                ring.empty(step, sum(depths), multiply)
                value, store = acc[...], Store(out_smem)
                factor = plgpu.load(gates_ref.at[_part(row, ROWS)], layout=per_row, optimized=False)
                factor = lax.broadcast_in_dim(factor, (ROWS, STORE), [0])
                total = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), per_row)
                for j in range(pieces):
                    slot = ring.slot(step + sum(depths) + j)
                    plgpu.barrier_wait(ring.ready.at[slot])
                    g, u = (
                        plgpu.load(smem.at[_warpgroup_rows(slot, size)], layout=wgmma).astype(
                            jnp.float32
                        )
                        for smem, size in ((dy_smem, BLOCK), (w_smem, columns))
                    )
                    # TMA overwrites what was just read into registers: order the two.
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(ring.free.at[slot])
                    d_hidden = value[:, j * STORE : (j + 1) * STORE]
                    hidden, g_slope, u_slope = gated(g, u, activation)
                    start_column, share = first + j * STORE, (d_hidden * hidden).sum(axis=1)
                    fresh = _fresh(start_column, column, columns, F)
                    total += share if fresh is None else share * jnp.where(fresh, 1.0, 0.0)
                    d_hidden *= factor
                    store(d_hidden * g_slope, d_gate_ref, row, start_column, fresh)
                    store(d_hidden * u_slope, d_up_ref, row, start_column, fresh)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the sums of a tile before
                sum_smem[group] = total
                plgpu.commit_smem()
                target = d_gates_ref.at[column, _part(row, ROWS)]
                plgpu.copy_smem_to_gmem(sum_smem.at[group], target)

        ring.run(used * across, lambda tile: sum(depths) + pieces, load, compute)

    scratch = [
        swizzled((config.stages * BLOCK, DEPTH), jnp.bfloat16),
        swizzled((config.stages * columns, DEPTH), jnp.bfloat16),
        plgpu.SMEM((WARPGROUPS, ROWS), jnp.float32),
    ]
    arrays = [dys, ws, gate, up, gates, segments.group, segments.active]
    out_type = [_shape(P, F), _shape(P, F), _shape(across, P, dtype=jnp.float32)]
    return _launch(kernel, out_type, scratch, 2, config, "grouped_gated_gradient", arrays)


def weight_gradient(x, dys, segments, *, config: Config):
    """bfloat16 [E, D, F] for each dy: x[start:end]' dy[start:end] of every expert.

    x [P, D], dys a list of [P, F]; D a multiple of 64, at least 128; 0 for an expert without rows.
    """
    D, E = x.shape[1], segments.starts.shape[0]
    columns = config.columns
    across = [pl.cdiv(dy.shape[1], columns) for dy in dys]
    down = pl.cdiv(D, BLOCK)
    tiles = down * sum(across)

    def kernel(x_ref, dy_refs, starts_ref, ends_ref, *refs):
        *out_refs, x_smem, dy_smem, out_smem, ready, free = refs
        ring = StageRing(ready, free, config)
        group = lax.axis_index("group")
        tile_of = _walk(sum(across), config.snake, jnp.int32(down))

        def of(tile):
            expert = lax.div(tile, jnp.int32(tiles))
            return expert, *tile_of(lax.rem(tile, jnp.int32(tiles)))

        def steps_of(tile):
            expert = lax.div(tile, jnp.int32(tiles))
            return lax.div(ends_ref[expert] - starts_ref[expert], jnp.int32(DEPTH))

        def each(column, action):
            """`action(k, column within dys[k])` for the k whose columns these are."""
            begin = 0
            for k, count in enumerate(across):
                inside = (column >= begin) & (column < begin + count)
                pl.when(inside)(functools.partial(action, k, column - begin))
                begin += count

        def load(tile, step):
            expert, row, column = of(tile)
            first = starts_ref[expert]

            def copy(p, slot, barrier):
                rows = _part(first + p * DEPTH, DEPTH)
                # A half for each warpgroup: a swizzled piece is 64 columns wide.
                for h in range(WARPGROUPS):
                    part = x_ref.at[rows, _part(_tile(row, BLOCK, D).start + h * ROWS, ROWS)]
                    target = x_smem.at[_part(slot * BLOCK + h * DEPTH, DEPTH)]
                    plgpu.copy_gmem_to_smem(part, target, barrier)

                def copy_dy(k, start_column):
                    part = dy_refs[k].at[rows, _tile(start_column, columns, dys[k].shape[1])]
                    target = dy_smem.at[_part(slot * DEPTH, DEPTH)]
                    plgpu.copy_gmem_to_smem(part, target, barrier)

                each(column, copy_dy)

            ring.fill(step, steps_of(tile), copy)

        def compute(tile, step):
            expert, row, column = of(tile)

            @functools.partial(pl.run_scoped, acc=plgpu.ACC((ROWS, columns), jnp.float32))
            def _(acc):
                def multiply(slot):
                    lhs = x_smem.at[_warpgroup_rows(slot)].transpose((1, 0))
                    plgpu.wgmma(acc, lhs, dy_smem.at[_part(slot * DEPTH, DEPTH)])

                ring.empty(step, steps_of(tile), multiply)
                value = acc[...]

                # An expert without rows took no step: the accumulator is 0, and so is its gradient.
                def send(k, start_column):
                    store, begin = (
                        Store(out_smem),
                        _tile(start_column, columns, dys[k].shape[1]).start,
                    )
                    target = _tile(row, BLOCK, D).start + group * ROWS
                    new_row = _fresh(target, row, BLOCK, D)
                    for j in range(0, columns, STORE):
                        fresh = _fresh(begin + j, start_column, columns, dys[k].shape[1])
                        fresh = fresh if new_row is None else _all_of(fresh, new_row)
                        piece = value[:, j : j + STORE]
                        store(piece, out_refs[k].at[expert], target, begin + j, fresh)

                each(column, send)

        ring.run(jnp.int32(E * tiles), steps_of, load, compute)

    scratch = [
        swizzled((config.stages * BLOCK, DEPTH), jnp.bfloat16),
        swizzled((config.stages * DEPTH, columns), jnp.bfloat16),
    ]
    arrays = [x, dys, segments.starts, segments.ends]
    out_type = [_shape(E, D, dy.shape[1]) for dy in dys]
    return _launch(kernel, out_type, scratch, 3, config, "grouped_weight_gradient", arrays)


GATHERED = 16  # rows of a stage of `gather`: so many copies are under way for each barrier
LANES = (256, 192, 128, 64)  # TMA moves boxes of at most 256 elements a side


def gather(x, index, active):
    """[P, D]: x[index[p]] for the rows of the first `active` blocks; undefined behind them.

    x [T, D] of 2-byte elements, D a multiple of 64; index int32 [P] in [0, T). XLA's own gather
    reaches less than half of the memory's rate.
    """
    (T, D), P = x.shape, index.shape[0]
    lanes = next(size for size in LANES if D % size == 0)
    x = x.reshape(T, D // lanes, lanes)
    # Of the 227 KiB of shared memory at most 192; one stage is sent while the others are filled.
    stages = max(2, min(6, 196_608 // (GATHERED * D * x.dtype.itemsize)))
    cores = num_cores()

    def kernel(x_ref, index_ref, active_ref, out_ref, smem, ready):
        core = lax.axis_index("core")
        pieces = active_ref[0] * (BLOCK // GATHERED)
        count = lax.div(pieces - core + (cores - 1), jnp.int32(cores))

        def first_row(n):
            return (core + n * cores) * GATHERED

        def fetch(n):
            slot = lax.rem(n, jnp.int32(stages))
            rows = [index_ref[first_row(n) + i] for i in range(GATHERED)]
            for i, row in enumerate(rows):
                plgpu.copy_gmem_to_smem(x_ref.at[row], smem.at[slot, i], ready.at[slot])

        @pl.loop(0, lax.min(count, jnp.int32(stages - 1)))
        def _(n):
            fetch(n)

        @pl.loop(0, count)
        def _(n):
            slot = lax.rem(n, jnp.int32(stages))
            plgpu.barrier_wait(ready.at[slot])
            target = out_ref.at[_part(first_row(n), GATHERED)]
            plgpu.copy_smem_to_gmem(smem.at[slot], target)
            # The stage that is filled next was sent in the step before this one.
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)

            @pl.when(n + (stages - 1) < count)
            def _():
                fetch(n + (stages - 1))

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    run = plgpu.kernel(
        kernel,
        out_type=_shape(P, D // lanes, lanes, dtype=x.dtype),
        scratch_types=[
            plgpu.SMEM((stages, GATHERED, D // lanes, lanes), x.dtype),
            plgpu.Barrier(num_barriers=stages, num_arrivals=GATHERED),
        ],
        grid=(cores,),
        grid_names=("core",),
        num_threads=1,
        thread_name="group",
        kernel_name="grouped_gather",
    )
    return run(x, index, active).reshape(P, D)
