"""Rows of trees cut into ragged chunks, and the order in which their states are computed.

A chunk is up to C tokens that follow each other in the row and on their branch. It ends where a
branch does: behind a token that has a child elsewhere, before one whose parent is not the token
before it. So the state that enters a chunk is the one that leaves its parent chunk, whole.

Chunks are walked depth first with one state in hand. A chunk with several children leaves its state
in a slot for the later ones. Where the child with the largest subtree comes last, whatever waits
has at most half of what remains below it, so log2(chunks) slots are enough for every forest:

    a - b - c - d ...       b's leaf, then c, then c's leaf, ...: one slot, where packed order
        |   |               would do as well; a star, a comb of combs, a chain of forks: the same
        leaf leaf
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

ROOT, NEIGHBOR = -1, -2


class Chunks(NamedTuple):
    """The chunks of B lists in the order in which they are walked; int32 [B, n], n as large as it
    can get."""

    row: jax.Array
    """[B]: which row of the batch a list belongs to."""
    start: jax.Array
    """First token; T behind the last chunk."""
    length: jax.Array
    """Tokens; 0 behind the last chunk."""
    source: jax.Array
    """Where the state comes from: NEIGHBOR (the chunk before in the list), ROOT or a slot."""
    keep: jax.Array
    """The slot in which it is left for later; `slots` for none."""
    count: jax.Array
    """[B]: chunks of each list."""
    slots: int

    def tokens(self, first: jax.Array, size: int, chunk: int) -> jax.Array:
        """int32 [B, size, chunk]: tokens of `size` chunks from `first`; huge for none."""
        start, length = (
            jax.lax.dynamic_slice_in_dim(x, first, size, axis=1) for x in (self.start, self.length)
        )
        offset = jnp.arange(chunk, dtype=jnp.int32)[None, None]
        return jnp.where(offset < length[..., None], start[..., None] + offset, 2**30)


def count_slots(tokens: int) -> int:
    """Slots that are enough for every forest of so many tokens."""
    return max(1, tokens.bit_length())


def cut_rows(prev, until, size: int, lanes: int, pad: int, align: int = 1) -> Chunks:
    """Rows cut into chunks of at most `size` tokens, dealt at their roots to `lanes` lists a row;
    n is a multiple of `pad`. prev None: each row is a chain. The ops say what both are. A chunk
    lies within `size` tokens from a multiple of `align` on, which divides `size`."""
    B, T = until.shape
    if prev is None:
        return _cut_chains(until, size, pad)
    slots, n = count_slots(T), -(-T // pad) * pad
    cut = jax.vmap(lambda prev, until: _cut(prev, until, size, align, slots, lanes, n))
    links, count = cut(prev, until)
    row = jnp.repeat(jnp.arange(B, dtype=jnp.int32), lanes)
    links = links.reshape(B * lanes, n, 4)
    return Chunks(row, *jnp.moveaxis(links, -1, 0), count.reshape(B * lanes), slots)


def _cut_chains(until, size: int, pad: int) -> Chunks:
    """Cut rows that are one chain each every `size` tokens."""
    B, T = until.shape
    n = -(-T // size // pad) * pad
    # Unused tokens of a chain are its last ones, so a count is enough.
    used = (until > jnp.arange(T, dtype=jnp.int32)[None]).sum(1, dtype=jnp.int32)
    index = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32), (B, n))
    length = jnp.clip(used[:, None] - index * size, 0, size)
    source = jnp.where(index == 0, ROOT, NEIGHBOR)
    row = jnp.arange(B, dtype=jnp.int32)
    return Chunks(row, index * size, length, source, jnp.ones_like(index), -(-used // size), 1)


def _cut(prev, until, size, align, slots, lanes, n):
    """([lanes, n, 4] of start, length, source and keep; count [lanes]) of one row."""
    T = len(prev)
    index = jnp.arange(T, dtype=jnp.int32)  # of tokens, and of chunks in packed order
    used = until > index
    nowhere = jnp.int32(T)

    def total(walk_index, value):
        return jnp.zeros(T + 1, jnp.int32).at[walk_index].add(value)[:T]

    def biggest(walk_index, value):
        return jnp.full(T + 1, -1, jnp.int32).at[walk_index].max(value)[:T]

    # Cuts.
    jumps = used & (prev != index - 1)
    # A token with a child elsewhere ends its chunk: its state must be complete when it is kept.
    forks = total(jnp.where(jumps & (prev >= 0), prev, nowhere), 1) > 0
    fresh = used & (jumps | (index == 0) | jnp.roll(forks, 1))
    begin = jax.lax.cummax(jnp.where(fresh, index, 0))
    heads = fresh | (used & ((index - begin // align * align) % size == 0))
    chunk = jnp.cumsum(heads, dtype=jnp.int32) - 1
    count = chunk[-1] + 1
    exists = index < count
    start = biggest(jnp.where(heads, chunk, nowhere), index)
    last = biggest(jnp.where(used, chunk, nowhere), index)

    # The tree of chunks: subtrees are ranges [c, end) of packed order.
    before = prev[start]
    parent = jnp.where(exists & (before >= 0), chunk[before], -1)
    # The subtree of a chunk ends with that of its last token, from which all children descend.
    end = jnp.where(exists, chunk[until[last] - 1] + 1, index + 1)
    weight, above = end - index, jnp.where(parent >= 0, parent, nowhere)
    largest = biggest(above, weight)
    is_largest = (parent >= 0) & (weight == largest[parent])
    # Of equally large children the last one in packed order.
    heavy = biggest(jnp.where(is_largest, parent, nowhere), index)

    # The walk: packed order with the heavy child behind its siblings.
    light = (parent >= 0) & (index != heavy[parent])
    behind = light & (index > heavy[parent])
    moved = jnp.where(behind, -weight[heavy[parent]], 0)
    moved = jnp.where((parent >= 0) & ~light, end[parent] - end, moved)
    # Both summed over a chunk and all above it.
    steps = jnp.stack([moved, light.astype(jnp.int32)], axis=1)
    ends = jnp.zeros((T + 1, 2), jnp.int32).at[end].add(steps)[:T]
    moved, level = jnp.cumsum(steps - ends, axis=0, dtype=jnp.int32).T
    walk_index = index + moved
    source = jnp.where(walk_index == walk_index[parent] + 1, NEIGHBOR, level[parent])
    source = jnp.where(parent < 0, ROOT, source)
    forked = total(jnp.where(light, parent, nowhere), 1) > 0
    keep = jnp.where(forked, level, slots)

    # Lists: whole trees side by side, about as many chunks each. Trees keep their packed order.
    root = jax.lax.cummax(jnp.where(parent < 0, index, 0))
    lane = jnp.minimum(root * lanes // jnp.maximum(count, 1), lanes - 1)
    lane = jnp.where(exists, lane, lanes)
    first = jnp.full(lanes + 1, T, jnp.int32).at[lane].min(root)
    counts = jnp.zeros(lanes + 1, jnp.int32).at[lane].add(1)[:lanes]
    links = jnp.stack([start, last - start + 1, source, keep], axis=1)
    empty = jnp.broadcast_to(jnp.array([T, 0, NEIGHBOR, slots], jnp.int32), (lanes, n, 4))
    return empty.at[lane, walk_index - first[lane]].set(links, mode="drop"), counts
