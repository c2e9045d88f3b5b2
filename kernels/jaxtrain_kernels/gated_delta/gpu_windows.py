"""Windows in which the Hopper kernels find the tokens of each chunk: C tokens of its row.

Arrays with a row for each token stay as they are, and a chunk's tokens are some of its window's:

    tokens   | others | the chunk | others |      C of them, from a multiple of TILE on
             window   offset      offset + length

The others have beta and g of 0 here, so they change neither state nor decay, and all that a kernel
makes of their rows to write it by token is exactly 0: windows of forests overlap, and what is
written there is added (`put_rows`).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxtrain_kernels.mosaic import opaque, plgpu
from jaxtrain_kernels.recurrence.chunks import ROOT, count_slots, cut_rows

C = 64
"""Tokens of a chunk: the rows of a wgmma."""

TILE = 8
"""Rows of a swizzled tile, which TMA moves whole."""


class Links(NamedTuple):
    """The chunks of B rows in the order of the walk, and the L lists that are walked side by side:
    runs of a row's chunks that ask for no state from outside. int32."""

    row: jax.Array
    """[L]: which row of the batch a list belongs to."""
    first: jax.Array
    """[L]: its first chunk."""
    count: jax.Array
    """[L]: its chunks."""
    total: jax.Array
    """[B]: chunks of a row."""
    window: jax.Array
    """[B, n]: first token of the chunk's window."""
    offset: jax.Array
    """[B, n]: tokens of others in it before the chunk's."""
    length: jax.Array
    """[B, n]: tokens; 0 behind the last chunk."""
    source: jax.Array
    """[B, n]: see `recurrence.chunks.Chunks`, and `keep` the same."""
    keep: jax.Array
    blank: jax.Array | None
    """[B, T / C]: bit i for tile i of so many tokens, set where chunks add to it or none writes it;
    None for chains."""


class Chunked(NamedTuple):
    """Inputs of all chunks; see `chunk.DeltaChunk`."""

    q: jax.Array
    """[B, T, H, K], and k the same."""
    k: jax.Array
    v: jax.Array
    """[B, T, N, V]."""
    beta: jax.Array
    """float32 [B, n, N, C], and G the same; by window."""
    G: jax.Array
    T: jax.Array | None = None
    """[B, n, N, C, C] in q's dtype, and P the same."""
    P: jax.Array | None = None


def capacity(tokens: int, chain: bool) -> int:
    """Chunks that a row can have here. Forests may have more, up to one a token: 32 and a quarter
    of the whole ones is what runs of 64 tokens each would need at 8,192."""
    full_chunks = -(-tokens // C)
    return full_chunks if chain else min(tokens, full_chunks + full_chunks // 4 + 32)


def missing_tokens(tokens: int, chain: bool) -> int:
    """Return the number of tokens to pad a row with, so that windows end inside of it."""
    size = C if chain else TILE
    return max(C, -(-tokens // size) * size) - tokens


def cut(prev, until) -> tuple[jax.Array, ...]:
    """start, length, source and keep [B, n] and the number [B] of the chunks of a forest's rows,
    and `Links.blank`."""
    B, T = until.shape
    # A static capacity: arrays of all possible chunks, one per token, would not fit.
    n, blocks = capacity(T, False), -(-T // C)
    *chunks, total = tuple(cut_rows(prev, until, C, 1, 1, align=TILE))[1:-1]
    start, length, *rest = (x[:, :n] for x in chunks)
    tiles = jnp.arange(C // TILE, dtype=jnp.int32)
    base_tiles = jnp.where(length == C, start // TILE, blocks * C)[..., None] + tiles
    blank = jax.vmap(lambda blank, base_tiles: blank.at[base_tiles].set(0, mode="drop"))(
        jnp.ones((B, blocks * C // TILE), jnp.int32), base_tiles.reshape(B, -1)
    )
    bits = (blank.reshape(B, blocks, -1) << tiles).sum(-1, dtype=jnp.int32)
    return start, length, *rest, total, bits


def find_links(until, lanes: int, cut_chunks) -> tuple[Links, int]:
    """(links, slots) of rows of tokens; `lanes` lists a row. `total` may exceed n: see `capacity`.
    until as in `gated_delta`; cut_chunks: what `cut` found in a forest's rows, None for chains."""
    B, T = until.shape
    rows = jnp.arange(B, dtype=jnp.int32)
    if cut_chunks is None:  # also chunks without tokens, which hand the state on
        chunks = cut_rows(None, until, C, 1, 1)
        _, start, length, source, keep, _, slots = chunks
        total = jnp.full(B, start.shape[1], jnp.int32)
        lists = (rows, jnp.zeros_like(rows), total)
        by_chunk = (start, jnp.zeros_like(start), length, source, keep)
        return Links(*lists, total, *by_chunk, None), slots
    start, length, source, keep, total, blank = cut_chunks
    n = start.shape[1]
    first = jax.vmap(lambda source, total: _deal(source, total, lanes))(source, total)
    count = jnp.diff(first, append=jnp.minimum(total, n)[:, None], axis=1)
    lists = (jnp.repeat(rows, lanes), first.reshape(-1), count.reshape(-1))
    # TMA needs aligned starts, and the last window must end within the row.
    window = jnp.minimum(start // TILE * TILE, T - C)
    links = Links(*lists, total, window, start - window, length, source, keep, blank)
    return links, count_slots(T)


def _deal(source, total, lanes: int):
    """First chunks [lanes] of lists of whole trees, about as many chunks each."""
    n = len(source)
    index = jnp.arange(n, dtype=jnp.int32)
    root = jnp.where((source == ROOT) & (index < total), index, jnp.minimum(total, n))
    # A list begins at the first tree that starts at or after its share of the chunks.
    targets = jnp.arange(lanes, dtype=jnp.int32) * total // lanes
    return jnp.where(root >= targets[:, None], root, jnp.minimum(total, n)).min(1)


def _tokens(links: Links) -> tuple[jax.Array, jax.Array]:
    """([B, n, C]: the tokens of each window; which of them are the chunk's)."""
    index = jnp.arange(C, dtype=jnp.int32)
    is_own = (index >= links.offset[..., None]) & (index < (links.offset + links.length)[..., None])
    return links.window[..., None] + index, is_own


def by_chunk(links: Links, x: jax.Array, chain: bool) -> jax.Array:
    """Numbers of tokens and heads [B, T, N] as [B, n, N, C], 0 at tokens of others."""
    (B, n), N = links.window.shape, x.shape[2]
    tokens, is_own = _tokens(links)
    if chain:
        # Chains are cut every C tokens: a reshape, no gather.
        taken = x.reshape(B, n, C, N)
    else:
        taken = jax.vmap(lambda row, index: row.at[index].get(mode="clip"))(x, tokens)
    return jnp.where(is_own[..., None], taken, jnp.zeros((), x.dtype)).swapaxes(2, 3)


def from_chunks(links: Links, x: jax.Array, chain: bool, tokens: int) -> jax.Array:
    """The inverse of `by_chunk`: [B, T, N], zeros at tokens that are in no chunk."""
    B, n, N, _ = x.shape
    token, is_own = _tokens(links)
    x = jnp.where(is_own[:, :, None], x, jnp.zeros((), x.dtype)).swapaxes(2, 3).reshape(B, n * C, N)
    if chain:
        return x
    token = jnp.where(is_own, token, tokens).reshape(B, n * C)
    index = jnp.broadcast_to(jnp.arange(n * C, dtype=jnp.int32), token.shape)
    nowhere = jnp.full((B, tokens), n * C, jnp.int32)

    # A gather by inverted indices, in place of a scatter of whole rows.
    def back(row, token, index, where):
        where = where.at[token].set(index, mode="drop")
        return row.at[where].get(mode="fill", fill_value=0)

    return jax.vmap(back)(x, token, index, nowhere)


def window_of(links: Links, row, chunk) -> pl.Slice:
    """In a kernel: the tokens of a chunk's window."""
    return pl.ds(pl.multiple_of(links.window[row, chunk], TILE), C)


def own_rows(links: Links, row, chunk):
    """In a kernel: a function that says of rows of the chunk's window which are its own."""
    # Opaque, or what it says is found ahead of a loop and spills.
    offset, length = opaque(links.offset[row, chunk]), links.length[row, chunk]
    return lambda index: (index >= offset) & (index < offset + length)


def put_rows(source, target, links: Links, row, chunk, chain: bool) -> None:
    """In a kernel: the rows [C, X] of a chunk's window, in shared memory, to its tokens in a
    reference [T, X]. Windows of forests overlap, in tiles that hold tokens of several chunks: there
    rows of others must be 0, and are added to what `target` holds: zeros first (`Links.blank`)."""
    if chain:
        plgpu.copy_smem_to_gmem(source, target.at[window_of(links, row, chunk)])
        return
    row = opaque(row)
    window = links.window[row, chunk]
    offset, length = links.offset[row, chunk], links.length[row, chunk]

    @pl.when(length == C)
    def _():
        plgpu.copy_smem_to_gmem(source, target.at[pl.ds(pl.multiple_of(window, TILE), C)])

    @pl.when(length < C)
    def _():
        tile = jnp.int32(TILE)

        @pl.loop(lax.div(offset, tile), lax.div(offset + length + tile - 1, tile))
        def _(i):
            source_rows = pl.ds(pl.multiple_of(i * tile, TILE), TILE)
            target_rows = pl.ds(pl.multiple_of(window + i * tile, TILE), TILE)
            plgpu.copy_smem_to_gmem(
                source.at[source_rows], target.at[target_rows], reduction_op="add"
            )
