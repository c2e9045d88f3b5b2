"""Tokens in the order in which the Hopper kernels walk them: chunk after chunk, each of C rows.

A chain is in that order as it stands and is not copied. Of a forest q, k and v are gathered, whole
rows of all heads, and o back. Rows at or behind a chunk's length hold what is not its own: finite
numbers, with beta and g of 0, so that they change neither state nor decay.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain_kernels.recurrence.chunks import ROOT, count_slots, cut_rows

C = 64
"""Tokens of a chunk: the rows of a wgmma."""


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
    start: jax.Array
    """[B, n]: first token."""
    length: jax.Array
    """[B, n]: tokens; 0 behind the last chunk."""
    source: jax.Array
    """[B, n]: see `recurrence.chunks.Chunks`, and `keep` the same."""
    keep: jax.Array


class Ordered(NamedTuple):
    """What a chunk is made of, in the order of the walk: see `chunk.Chunk`."""

    q: jax.Array
    """[B, n C, H, K], and k the same."""
    k: jax.Array
    v: jax.Array
    """[B, n C, N, V]."""
    beta: jax.Array
    """float32 [B, n, N, C], and G the same."""
    G: jax.Array
    T: jax.Array | None = None
    """[B, n, N, C, C] in q's dtype, and P the same."""
    P: jax.Array | None = None


def capacity(tokens: int, chain: bool) -> int:
    """Chunks that a row can have here. Forests may have more, up to one a token: 32 and a quarter
    of the whole ones is what runs of 64 tokens each would need at 8,192."""
    whole = -(-tokens // C)
    return whole if chain else min(tokens, whole + whole // 4 + 32)


def cut(prev, until) -> tuple[jax.Array, ...]:
    """start, length, source and keep [B, n] and the number [B] of the chunks of a forest's rows."""
    return tuple(cut_rows(prev, until, C, 1, 1))[1:-1]


def order_rows(prev, until, lanes: int, found=None) -> tuple[Links, int]:
    """(links, slots) of rows of tokens; `lanes` lists a row. `total` may exceed n: see `capacity`.
    prev and until as in `gated_delta`; found: what `cut` found in them before."""
    B, T = until.shape
    n = capacity(T, prev is None)
    rows = jnp.arange(B, dtype=jnp.int32)
    if prev is None:  # also chunks without tokens, which hand the state on
        chunks = cut_rows(prev, until, C, 1, 1)
        total = jnp.full(B, n, jnp.int32)
        links = Links(rows, jnp.zeros_like(rows), total, total, *chunks[1:5])
        return links, chunks.slots
    *links, total = cut(prev, until) if found is None else found
    start, length, source, keep = (x[:, :n] for x in links)
    first = jax.vmap(lambda source, total: _deal(source, total, lanes))(source, total)
    count = jnp.diff(first, append=jnp.minimum(total, n)[:, None], axis=1)
    lists = (jnp.repeat(rows, lanes), first.reshape(-1), count.reshape(-1))
    return Links(*lists, total, start, length, source, keep), count_slots(T)


def _deal(source, total, lanes: int):
    """First chunks [lanes] of lists of whole trees, about as many chunks each."""
    n = len(source)
    index = jnp.arange(n, dtype=jnp.int32)
    root = jnp.where((source == ROOT) & (index < total), index, jnp.minimum(total, n))
    wanted = jnp.arange(lanes, dtype=jnp.int32) * total // lanes
    return jnp.where(root >= wanted[:, None], root, jnp.minimum(total, n)).min(1)


def _own(links: Links):
    """bool [B, n, C]: which rows of the order are tokens."""
    return jnp.arange(C, dtype=jnp.int32) < links.length[..., None]


def into_order(links: Links, x: jax.Array, chain: bool, *, clear: bool = False) -> jax.Array:
    """x [B, T, ...] as [B, n C, ...]; `clear`: zeros where there is no token."""
    B, n = links.start.shape
    place = jnp.arange(C, dtype=jnp.int32)
    own = _own(links).reshape(B, n * C, *(1,) * (x.ndim - 2))
    if chain:
        missing = n * C - x.shape[1]
        ordered = jnp.pad(x, ((0, 0), (0, missing)) + ((0, 0),) * (x.ndim - 2)) if missing else x
        return jnp.where(own, ordered, jnp.zeros((), x.dtype)) if clear else ordered
    tokens = (links.start[..., None] + place).reshape(B, n * C)
    if clear:
        tokens = jnp.where(own.reshape(B, n * C), tokens, x.shape[1])
    options = {"mode": "fill", "fill_value": 0} if clear else {"mode": "clip"}
    return jax.vmap(lambda row, index: row.at[index].get(**options))(x, tokens)


def by_chunk(links: Links, x: jax.Array, chain: bool) -> jax.Array:
    """Numbers of tokens and heads [B, T, N] as [B, n, N, C], zeros where there is no token."""
    B, n = links.start.shape
    return into_order(links, x, chain, clear=True).reshape(B, n, C, -1).swapaxes(2, 3)


def out_of_order(links: Links, x: jax.Array, chain: bool, tokens: int) -> jax.Array:
    """The inverse of `into_order`: [B, T, ...]; of forests zeros at tokens that are in no chunk."""
    if chain:
        return x[:, :tokens]
    B, n = links.start.shape
    place = jnp.arange(C, dtype=jnp.int32)
    token = jnp.where(_own(links), links.start[..., None] + place, tokens).reshape(B, n * C)
    index = jnp.broadcast_to(jnp.arange(n * C, dtype=jnp.int32), token.shape)
    nowhere = jnp.full((B, tokens), n * C, jnp.int32)

    def back(row, token, index, where):
        where = where.at[token].set(index, mode="drop")
        return row.at[where].get(mode="fill", fill_value=0)

    return jax.vmap(back)(x, token, index, nowhere)


def from_chunks(links: Links, x: jax.Array, chain: bool, tokens: int) -> jax.Array:
    """The inverse of `by_chunk`: [B, T, N], zeros at tokens that are in no chunk."""
    B, n, N, _ = x.shape
    x = jnp.where(_own(links)[:, :, None], x, jnp.zeros((), x.dtype))
    return out_of_order(links, x.swapaxes(2, 3).reshape(B, n * C, N), chain, tokens)
