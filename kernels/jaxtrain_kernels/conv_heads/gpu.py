"""conv_heads by kernels (Pallas, Triton; any NVIDIA GPU): one read and one write of each number.

A program takes some tokens of one part of a key head: its queries, its keys, or K columns of its
values. It fetches what each token reads on its branch itself (the taps' reads of one tile come from
the cache), so nothing is shifted or put into another order, and writes the part where it belongs.
The backward computes all of it again from x. It leaves the gradient before the convolution in
memory, and the sums over its tokens for the taps; `recurrence.gpu_conv` makes x's gradient of the
first, XLA the taps' of the second, in a fixed order.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxtrain_kernels.recurrence import gpu_conv
from jaxtrain_kernels.recurrence.gpu_conv import DTYPES, FEW, spread
from jaxtrain_kernels.recurrence.hops import Hops, find_hops
from jaxtrain_kernels.triton import plt, require_nvidia

DIMS = (64, 128, 256)


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of the kernels."""

    tokens: int = 32
    """Of a program."""
    warps: int = 4
    gradient_warps: int = 8


@dataclasses.dataclass(frozen=True)
class ColumnParts:
    """Static layout of x's columns."""

    key_dim: int
    width: int
    """F: columns of a key head."""
    taps: int
    eps: float
    config: Config

    @property
    def each(self) -> int:
        """ColumnParts of a key head."""
        return self.width // self.key_dim

    @property
    def scales(self) -> tuple[float, float]:
        """Lengths of queries and keys."""
        return self.key_dim**-0.5, 1.0


def conv_heads(x, w, key_dim, value_dim, prev=None, *, tail=None, hops=None, eps):
    """Implement `jaxtrain_kernels.conv_heads`; packed rows, one GPU per call."""
    require_nvidia()
    F, T = w.shape[1], x.shape[1]
    if prev is None or T < FEW:
        raise NotImplementedError(f"takes packed rows of at least {FEW} tokens")
    if x.dtype not in DTYPES:
        raise NotImplementedError(f"takes float32 and less, got {x.dtype}")
    if key_dim not in DIMS or F % key_dim:
        raise NotImplementedError(
            f"{F} columns of a head are not cut into parts of {key_dim}, of {DIMS}"
        )
    parts = ColumnParts(key_dim, F, w.shape[-1], eps, Config())
    return run(parts, x, w, value_dim, find_hops(prev, w.shape[-1]) if hops is None else hops)


def run(parts: ColumnParts, x, w, value_dim: int, hops: Hops, *, interpret: bool = False):
    """`conv_heads` behind its checks."""
    (B, T, _), (H, F, taps) = x.shape, w.shape
    q, k, v = _convolve(parts, interpret, x, w.reshape(H * F, taps), hops)
    q, k = (y.reshape(B, T, H, parts.key_dim) for y in (q, k))
    return q, k, v.reshape(B, T, -1, value_dim)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _convolve(parts, interpret, x, w, hops):
    return _convolve_fwd(parts, interpret, x, w, hops)[0]


def _convolve_fwd(parts, interpret, x, w, hops):
    outs = _forward(parts, interpret, x, w, hops)
    # In a loop XLA would run the kernel twice: for its results, and into the stack of all layers'.
    return lax.optimization_barrier(outs), (x, w, hops)


def _convolve_bwd(parts, interpret, residuals, d_outs):
    x, w, hops = residuals
    d_mixed, sums = _backward(parts, interpret, x, w, hops, *d_outs)
    dx = gpu_conv.transposed(d_mixed, w, hops, interpret=interpret)
    dx = jnp.pad(dx, ((0, 0), (0, 0), (0, x.shape[2] - dx.shape[2])))
    return dx, sums.sum(0).T.astype(w.dtype), None


_convolve.defvjp(_convolve_fwd, _convolve_bwd)


def _call(
    kernel, parts: ColumnParts, warps: int, interpret: bool, name: str, out_shape, hops, w, x, *rest
):
    (B, T, _), C = x.shape, w.shape[0]
    return pl.pallas_call(
        functools.partial(kernel, parts=parts),
        grid=(C // parts.key_dim, pl.cdiv(T, parts.config.tokens), B),
        out_shape=out_shape,
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name=name,
    )(hops.back, w.astype(jnp.float32).T, x, *rest)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _forward(parts: ColumnParts, interpret: bool, x, w, hops: Hops):
    """q, k [B, T, H K] and v [B, T, N V]."""
    B, T, _ = x.shape
    heads, K = w.shape[0] // parts.width, parts.key_dim
    widths = heads * K, heads * K, heads * (parts.width - 2 * K)
    shapes = [jax.ShapeDtypeStruct((B, T, width), x.dtype) for width in widths]
    sizes = parts, parts.config.warps, interpret
    return _call(_forward_kernel, *sizes, "conv_heads", shapes, hops, w, x)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _backward(parts: ColumnParts, interpret: bool, x, w, hops: Hops, d_q, d_k, d_v):
    """(the gradient before the convolution [B, T, C], sums for the taps [tiles, W, C])."""
    (B, T, _), C = x.shape, w.shape[0]
    tiles = B * pl.cdiv(T, parts.config.tokens)
    shapes = [
        jax.ShapeDtypeStruct((B, T, C), x.dtype),
        jax.ShapeDtypeStruct((tiles, parts.taps, C), jnp.float32),
    ]
    sizes, rest = (parts, parts.config.gradient_warps, interpret), (d_q, d_k, d_v)
    return _call(_backward_kernel, *sizes, "conv_heads_back", shapes, hops, w, x, *rest)


def _forward_kernel(back_ref, w_ref, x_ref, q_ref, k_ref, v_ref, *, parts: ColumnParts):
    block = _Part(back_ref, w_ref, x_ref, parts)
    mixed, share, _ = block.convolve()
    out = mixed * share
    # Computed for values, too, where it is not used: cheaper than a branch.
    inverse = lax.rsqrt((out * out).sum(1) + parts.eps) * block.lengths()
    out = block.of_keys(out * inverse[:, None], out).astype(q_ref.dtype)
    # A program has one kind of columns. All three stores are traced, one of them is executed: an
    # output cannot be selected by a traced index.
    for kind, ref in enumerate((q_ref, k_ref, v_ref)):
        index, mask = block.output_index(kind)

        @pl.when(block.kind == kind)
        def _(ref=ref, index=index, mask=mask):
            plt.store(ref.at[block.row, *index], out, mask=mask)


def _backward_kernel(
    back_ref, w_ref, x_ref, dq_ref, dk_ref, dv_ref, d_mixed_ref, sums_ref, *, parts: ColumnParts
):
    block = _Part(back_ref, w_ref, x_ref, parts)
    mixed, share, reads = block.convolve()
    out = mixed * share
    d_out = 0.0
    for kind, ref in enumerate((dq_ref, dk_ref, dv_ref)):  # of which one is read
        index, mask = block.output_index(kind)
        # Masked loads return 0 for the two gradients of other kinds, so the sum is the one that
        # applies.
        mask &= jnp.broadcast_to(block.kind == kind, mask.shape)
        part = plt.load(ref.at[block.row, *index], mask=mask, other=0.0)
        d_out += part.astype(jnp.float32)
    inverse = lax.rsqrt((out * out).sum(1) + parts.eps)[:, None]
    unit = out * inverse
    along = (d_out * unit).sum(1)[:, None]
    d_unit = (d_out - unit * along) * inverse * block.lengths()[:, None]
    d_out = block.of_keys(d_unit, d_out)
    d_mixed = d_out * share * (1.0 + mixed * (1.0 - share))
    index, mask = block.tile
    # Rows past the end must not count in the sums over tokens.
    d_mixed = jnp.where(mask, d_mixed, 0.0)
    plt.store(d_mixed_ref.at[block.row, *index], d_mixed.astype(d_mixed_ref.dtype), mask=mask)
    tile = block.row * pl.num_programs(1) + pl.program_id(1)
    for j, read in enumerate(reads):
        # Each program writes its own sums, which XLA adds in a fixed order: atomics would not be
        # deterministic.
        sums_ref[tile, parts.taps - 1 - j, block.columns] = (d_mixed * read).sum(0)


class _Part:
    """The tokens and columns of a program, and what they are convolved to."""

    def __init__(self, back_ref, w_ref, x_ref, parts: ColumnParts):
        self.back_ref, self.w_ref, self.x_ref, self.parts = back_ref, w_ref, x_ref, parts
        part, tile, self.row = (pl.program_id(axis) for axis in range(3))
        K, S = parts.key_dim, parts.config.tokens
        self.head, part_index = part // parts.each, part % parts.each
        self.kind = jnp.minimum(part_index, 2)
        """0: queries, 1: keys, 2: values."""
        self.value = part_index - 2
        self.token_S = tile * S + jnp.arange(S, dtype=jnp.int32)
        self.inside_S = self.token_S < x_ref.shape[1]
        self.columns = pl.ds(part * K, K)
        self.column_C = part * K + jnp.arange(K, dtype=jnp.int32)
        self.tile = self._spread(self.token_S, self.inside_S, self.column_C)

    def _spread(self, token_S, exists_S, column_C):
        everywhere = jnp.ones(column_C.shape, bool)
        return spread(token_S, exists_S, column_C=column_C, inside_C=everywhere)

    def of_keys(self, unit, plain):
        """`unit` for queries and keys, `plain` for values."""
        # The lowering wants a condition of its operands' shape.
        return jnp.where(jnp.broadcast_to(self.kind < 2, unit.shape), unit, plain)

    def lengths(self):
        """[S] lengths of queries or keys; 1 for values, which do not use it."""
        query, key = (jnp.full(self.token_S.shape, x, jnp.float32) for x in self.parts.scales)
        return jnp.where(jnp.broadcast_to(self.kind == 0, query.shape), query, key)

    def output_index(self, kind: int):
        """Return (index, mask) of this part in the array of all queries, keys or values."""
        K = self.parts.key_dim
        start = self.head * K
        if kind == 2:
            start = self.head * (self.parts.width - 2 * K) + jnp.maximum(self.value, 0) * K
        column_C = start + jnp.arange(K, dtype=jnp.int32)
        return self._spread(self.token_S, self.inside_S, column_C)

    def convolve(self):
        """(y, 1 / (1 + exp(-y)), [x of the tokens 0, 1, .. before]), float32 [S, C]."""
        reads, taps = [], self.parts.taps
        total = 0.0
        for j in range(taps):
            token_S, exists_S = self.token_S, self.inside_S
            if j:
                token_S = plt.load(
                    self.back_ref.at[self.row, j - 1, token_S], mask=exists_S, other=-1
                )
                exists_S = token_S >= 0
            index, mask = self._spread(jnp.maximum(token_S, 0), exists_S, self.column_C)
            read = plt.load(self.x_ref.at[self.row, *index], mask=mask, other=0.0)
            reads.append(read.astype(jnp.float32))
            total += reads[-1] * self.w_ref[taps - 1 - j, self.columns][None]
        return total, jax.nn.sigmoid(total), reads
