"""The norm and rotation of heads for Hopper, Pallas Mosaic GPU: one read and one write of each.

A thread block is one warpgroup with 64 tokens of a few heads, all of which TMA has under way at
once; several blocks share a multiprocessor and hide each other's waits. A head's results take its
place in shared memory and leave by TMA from there, to where their part lies; heads that only pass
do so without touching a register. Cosines and sines are read once for the heads of a block.

In the layout of wgmma a thread has two rows, and four lanes share one: a row's sums are cheap. A
head is computed strip by strip, so that little of it is in float32 at a time.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxtrain_kernels.mosaic import plgpu, swizzled

ROWS = 64  # tokens of a thread block: rows of a warpgroup
STRIP = 16  # columns computed at a time


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of the kernels."""

    heads: int = 4
    """At most so many heads of a thread block in the forward."""
    gradient_heads: int = 2
    """In the backward, where each has two tiles."""


@dataclasses.dataclass(frozen=True)
class Heads:
    """Which heads a row of x has: static, shared by both directions."""

    counts: tuple[int, ...]
    """Heads of each part that is rotated, in x's order."""
    passed: int
    """Heads behind them."""
    head_dim: int
    half: int
    """Half of the dims that are rotated."""

    @property
    def parts(self) -> tuple[int, ...]:
        return (*self.counts, *([self.passed] if self.passed else []))

    @property
    def rotated(self) -> int:
        return sum(self.counts)

    @property
    def piece(self) -> int:
        """Columns of a swizzled row of shared memory: the most that pairs are made of."""
        return math.gcd(self.half, 64)

    def group(self, limit: int) -> int:
        """Heads of a thread block: as many as divide every part."""
        common = math.gcd(*self.parts)
        return max(n for n in range(1, limit + 1) if common % n == 0)

    def owners(self, first):
        """(part, whether the heads from `first` on are its own, their place in it)."""
        start = 0
        for part, count in enumerate(self.parts):
            yield part, (first >= start) & (first < start + count), first - start
            start += count


# Compiled once, however often a program calls them with the same shapes.
@functools.partial(jax.jit, static_argnames=("heads", "eps", "config"))
def forward(x, cos, sin, scales, heads: Heads, *, eps: float, config: Config):
    """The parts, [M, n H] each, of x bfloat16 [M, F]; M a multiple of 64.

    cos, sin float32 [M, half]; scales float32 [parts, H], or None where there is no norm.
    """
    M, H = x.shape[0], heads.head_dim
    size = heads.group(config.heads)
    groups = sum(heads.parts) // size

    def kernel(x_ref, cos_ref, sin_ref, scales_ref, outs, smem, ready):
        tile, first = _locate(groups, size)
        rows = pl.ds(pl.multiple_of(tile * ROWS, ROWS), ROWS)
        for i in range(size):
            # All heads' copies are started before any is waited for.
            source = x_ref.at[rows, _columns(first + i, H)]
            plgpu.copy_gmem_to_smem(source, smem.at[i], ready.at[i])

        def leave(i):
            for part, is_owner, head in heads.owners(first):

                @pl.when(is_owner)
                def _(part=part, head=head):
                    target = outs[part].at[rows, _columns(head + i, H)]
                    plgpu.copy_smem_to_gmem(smem.at[i], target)

        @pl.when(first < heads.rotated)
        def rotate():
            cos_sin = _CosSin(cos_ref, sin_ref, rows, heads)
            weights = _Weights(scales_ref, first, heads)
            for i in range(size):
                plgpu.barrier_wait(ready.at[i])
                head = _HeadTile(smem.at[i], heads)
                if scales is None:
                    head.store(cos_sin.rotate(head.strip))
                else:
                    squares = 0.0
                    for column in head.strips:
                        squares += head.strip(*column) * head.strip(*column)
                    # Statistics in float32, of the bfloat16 numbers as they are stored.
                    inverse = _inverse(squares, H, eps)
                    head.narrow()

                    def scaled(p, c, head=head, inverse=inverse):
                        return head.strip(p, c) * inverse * weights.strip(p, c)

                    head.store(cos_sin.rotate(scaled))
                plgpu.commit_smem()
                leave(i)

        if heads.passed:

            @pl.when(first >= heads.rotated)
            def carry():
                for i in range(size):
                    plgpu.barrier_wait(ready.at[i])
                    leave(i)

        # Shared memory may be reused by the next thread block only after TMA has read it.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    outs = [jax.ShapeDtypeStruct((M, n * H), x.dtype) for n in heads.parts]
    scratch = [swizzled((size, ROWS, H), x.dtype, heads.piece), plgpu.Barrier(num_barriers=size)]
    programs = M // ROWS * groups
    return _launch(kernel, "rotate_heads", [outs], scratch, programs, x, cos, sin, scales)[0]


@functools.partial(jax.jit, static_argnames=("heads", "eps", "config"))
def backward(d_outs, x, cos, sin, scales, heads: Heads, *, eps: float, config: Config):
    """(x's gradient [M, F], the scales' float32 [parts, H] or None) of those of the parts.

    The sums over tokens are of each block's own, float32, in a fixed order. Without scales x is not
    read.
    """
    M, H = x.shape[0], heads.head_dim
    size = heads.group(config.gradient_heads)
    groups = sum(heads.parts) // size
    tiles, summed = M // ROWS, heads.rotated // size
    normed = scales is not None

    def kernel(refs, cos_ref, sin_ref, scales_ref, results, scratch):
        (d_refs, x_ref), (dx_ref, sums_ref) = refs, results
        d_smem, x_smem, sums_smem, ready = scratch
        tile, first = _locate(groups, size)
        rows = pl.ds(pl.multiple_of(tile * ROWS, ROWS), ROWS)
        for i in range(size):
            for part, is_owner, head in heads.owners(first):

                @pl.when(is_owner)
                def _(i=i, part=part, head=head):
                    source = d_refs[part].at[rows, _columns(head + i, H)]
                    plgpu.copy_gmem_to_smem(source, d_smem.at[i], ready.at[0, i])

            if normed:

                @pl.when(first < heads.rotated)
                def _(i=i):
                    source = x_ref.at[rows, _columns(first + i, H)]
                    plgpu.copy_gmem_to_smem(source, x_smem.at[i], ready.at[1, i])

        def leave(i):
            plgpu.copy_smem_to_gmem(d_smem.at[i], dx_ref.at[rows, _columns(first + i, H)])

        @pl.when(first < heads.rotated)
        def rotate():
            cos_sin = _CosSin(cos_ref, sin_ref, rows, heads)
            weights = _Weights(scales_ref, first, heads)
            totals = {}
            for i in range(size):
                plgpu.barrier_wait(ready.at[0, i])
                d_tile = _HeadTile(d_smem.at[i], heads)
                if not normed:
                    d_tile.store(cos_sin.rotate(d_tile.strip, back=True))
                else:
                    plgpu.barrier_wait(ready.at[1, i])
                    x_tile = _HeadTile(x_smem.at[i], heads)
                    squares = mean = 0.0
                    for column, d in cos_sin.rotate(d_tile.strip, back=True):
                        part = x_tile.strip(*column)
                        squares += part * part
                        mean += d * weights.strip(*column) * part
                    inverse = _inverse(squares, H, eps)
                    mean = _by_row(mean.sum(axis=1) * (1 / H)) * inverse
                    x_tile.narrow()
                    # Keeps bfloat16 instead of float32 alive through the second pass: else
                    # registers spill.
                    d_tile.narrow()

                    def gradients(x_tile=x_tile, d_tile=d_tile, inverse=inverse, mean=mean):
                        for column, d in cos_sin.rotate(d_tile.strip, back=True):
                            unit = x_tile.strip(*column) * inverse
                            totals[column] = totals.get(column, 0.0) + d * unit
                            yield column, (d * weights.strip(*column) - unit * mean) * inverse

                    d_tile.store(gradients())
                plgpu.commit_smem()
                leave(i)
            if normed:
                for p in range(H // heads.piece):
                    strips = [total for (piece, _), total in sorted(totals.items()) if piece == p]
                    line = jnp.concatenate(strips, axis=1).sum(axis=0)
                    sums_smem[pl.ds(p * heads.piece, heads.piece)] = line
                plgpu.commit_smem()
                sum_index = tile * summed + lax.div(first, jnp.int32(size))
                plgpu.copy_smem_to_gmem(sums_smem, sums_ref.at[sum_index])

        if heads.passed:

            @pl.when(first >= heads.rotated)
            def carry():
                for i in range(size):
                    plgpu.barrier_wait(ready.at[0, i])
                    leave(i)

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    tile_smem = swizzled((size, ROWS, H), x.dtype, heads.piece)
    results = [
        jax.ShapeDtypeStruct((M, sum(heads.parts) * H), x.dtype),
        jax.ShapeDtypeStruct((tiles * summed, H), jnp.float32) if normed else None,
    ]
    scratch = [
        tile_smem,
        tile_smem if normed else None,
        plgpu.SMEM((H,), jnp.float32) if normed else None,
        plgpu.Barrier(num_barriers=(2, size)),
    ]
    arrays = [d_outs, x if normed else None]
    dx, sums = _launch(
        kernel, "rotate_heads_back", [results], [scratch], tiles * groups, arrays, cos, sin, scales
    )[0]
    if not normed:
        return dx, None
    # Sums over tokens are added by XLA in a fixed order: atomics would not be deterministic.
    sums = sums.reshape(tiles, summed, H)
    ends = [sum(heads.counts[: part + 1]) // size for part in range(len(heads.counts))]
    part_tiles = zip([0, *ends], ends, strict=False)
    return dx, jnp.stack([sums[:, start:end].sum((0, 1)) for start, end in part_tiles])


class _HeadTile:
    """64 tokens of a head in registers, as bfloat16 pieces [ROWS, C]; strips of it in float32."""

    def __init__(self, ref, heads: Heads):
        C = heads.piece
        self.ref, self.C = ref, C
        self.pieces = [
            plgpu.load(ref.at[:, pl.ds(p * C, C)], layout=plgpu.Layout.WGMMA)
            for p in range(heads.head_dim // C)
        ]
        self.strips = [(p, c) for p in range(len(self.pieces)) for c in range(0, C, STRIP)]

    def strip(self, p: int, c: int):
        return self.pieces[p][:, c : c + STRIP].astype(jnp.float32)

    def narrow(self):
        """Keep no strip from here on: what is asked for later is widened again."""
        self.pieces = lax.optimization_barrier(self.pieces)

    def store(self, strips):
        """Put (at, strip) of all its strips in its place in shared memory."""
        rounded = {column: strip.astype(self.ref.dtype) for column, strip in strips}
        for p in range(len(self.pieces)):
            columns = [rounded[p, c] for c in range(0, self.C, STRIP)]
            self.ref[:, pl.ds(p * self.C, self.C)] = jnp.concatenate(columns, axis=1)


class _CosSin:
    """cos and sin of a block's tokens, in registers."""

    def __init__(self, cos_ref, sin_ref, rows, heads: Heads):
        C = heads.piece
        self.C, self.pieces, self.rotated = C, heads.head_dim // C, heads.half // C

        def read(ref, p):
            part = ref.at[rows, pl.ds(p * C, C)]
            return plgpu.load(part, layout=plgpu.Layout.WGMMA, optimized=False)

        self.pairs = [(read(cos_ref, p), read(sin_ref, p)) for p in range(self.rotated)]

    def rotate(self, strip, back: bool = False):
        """((piece, column), strip) of all strips of a head, those of the rotated dims turned."""
        for p in range(self.rotated):
            for c in range(0, self.C, STRIP):
                cos, sin = (turn[:, c : c + STRIP] for turn in self.pairs[p])
                partner = p + self.rotated
                first, second = strip(p, c), strip(partner, c)
                if back:
                    # The transpose of a rotation is the rotation by the negative angle.
                    yield (p, c), first * cos + second * sin
                    yield (partner, c), second * cos - first * sin
                else:
                    yield (p, c), first * cos - second * sin
                    yield (partner, c), second * cos + first * sin
        for p in range(2 * self.rotated, self.pieces):
            for c in range(0, self.C, STRIP):
                yield (p, c), strip(p, c)


class _Weights:
    """The scale of the part with head `first`, spread over rows; none where there is no norm."""

    def __init__(self, scales_ref, first, heads: Heads):
        if scales_ref is None:
            return
        C, wgmma = heads.piece, plgpu.Layout.WGMMA
        part = sum(
            (
                (first >= sum(heads.parts[:n])).astype(jnp.int32)
                for n in range(1, len(heads.counts))
            ),
            jnp.int32(0),
        )
        self.pieces = []
        for p in range(heads.head_dim // C):
            line = scales_ref.at[part, pl.ds(p * C, C)]
            line = plgpu.load(line, layout=wgmma.reduce(0), optimized=False)
            self.pieces.append(lax.broadcast_in_dim(line, (ROWS, C), [1]))

    def strip(self, p: int, c: int):
        return plgpu.layout_cast(self.pieces[p][:, c : c + STRIP], plgpu.Layout.WGMMA)


def _locate(groups: int, size: int):
    """(tile of tokens, first head) of this thread block: blocks of a tile run side by side, so
    that its angles are read from memory once."""
    program = lax.axis_index("program")
    tile = lax.div(program, jnp.int32(groups))
    return tile, lax.rem(program, jnp.int32(groups)) * size


def _columns(head, H: int):
    return pl.ds(pl.multiple_of(head * H, H), H)


def _inverse(squares, H: int, eps: float):
    """1 / sqrt(mean(x^2) + eps) of each row, on a strip."""
    return _by_row(lax.rsqrt(squares.sum(axis=1) * (1 / H) + eps))


def _by_row(line):
    """Numbers of rows, spread on a strip."""
    return plgpu.layout_cast(lax.broadcast_in_dim(line, (ROWS, STRIP), [0]), plgpu.Layout.WGMMA)


def _launch(kernel, name, out_type, scratch, programs, *arrays):
    run = plgpu.kernel(
        kernel,
        out_type=out_type,
        scratch_types=scratch,
        grid=(programs,),
        grid_names=("program",),
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )
    return run(*arrays)
