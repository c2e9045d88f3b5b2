"""Reads of a convolution along branches of packed forests, by reader and by token read, for
kernels.

Most tokens read the ones right before them in the row. A *jump* is a read of any other: of a token
whose branch goes on elsewhere, by the first tokens of the later branches.

    row      a b c | d e | f g        b has the children c, d and f: d, e, f, g jump
    d reads  b (1 before), a (2 before);   e reads  d, b, a, of which b and a are jumps

The gradient of a token is that of the tokens right behind it, as far as their branch is its own,
and that of jumps to it, which are sorted by the token they read: sums have one order, and nothing
is scattered.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

TILE = 64
"""Tokens whose jumps have one entry in `Hops.first`."""


class Hops(NamedTuple):
    """int32, of B rows of T tokens and W taps."""

    back: jax.Array
    """[B, W - 1, T]: the token 1, 2, .. before on the branch; -1 where there is none."""
    target: jax.Array
    """[B, P]: the token that a jump reads, in ascending order, T behind the last; P = T (W - 1)."""
    source: jax.Array
    """[B, P]: token * (W - 1) + distance - 1 of the jump's own token."""
    first: jax.Array
    """[B, tiles + 1]: the first jump to a token of each tile, and the end."""


def find_hops(prev: jax.Array, taps: int) -> Hops:
    """Find the hops of prev int32 [B, T] and a convolution of `taps` taps (at least 2)."""
    B, T = prev.shape
    index = jnp.arange(T, dtype=jnp.int32)
    hop = jnp.broadcast_to(index, (B, T))
    back = []
    for _ in range(taps - 1):
        before = jnp.take_along_axis(prev, jnp.maximum(hop, 0), axis=1)
        hop = jnp.where(hop < 0, -1, before)
        back.append(hop)
    by_token = jnp.stack(back, axis=2)  # [B, T, W - 1]
    near = index[:, None] - jnp.arange(1, taps, dtype=jnp.int32)[None]
    target = jnp.where((by_token >= 0) & (by_token != near[None]), by_token, T).reshape(B, -1)
    # Stable, so that reads of one token are added in the order of their readers.
    order = jnp.argsort(target, axis=1, stable=True).astype(jnp.int32)
    target = jnp.take_along_axis(target, order, axis=1)
    tiles = -(-T // TILE)
    tile = jnp.where(target < T, target // TILE, tiles)
    count = jax.vmap(lambda tile: jnp.zeros(tiles + 1, jnp.int32).at[tile].add(1))(tile)
    first = jnp.pad(jnp.cumsum(count[:, :tiles], axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))
    return Hops(jnp.stack(back, axis=1), target, order, first)
