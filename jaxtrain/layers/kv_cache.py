"""Attention's state while decoding: keys and values, of all tokens or of the last ones.

A token at position p takes slot p of S. A layer with a window keeps no more slots than the window
has; once these are S, slot p % S is used again: a ring.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtrain_kernels import Context

from jaxtrain.layers.mixer import Decoding


class KV(NamedTuple):
    """Keys and values that were computed already."""

    k: jax.Array
    """[B, S, K, H], and v the same."""
    v: jax.Array


class PackedKV(NamedTuple):
    """Keys and values of packed rows and of what goes on behind any of their tokens: no slot stands
    for a position, and who sees it the context alone says."""

    k: jax.Array
    """[B, S, K, H], and v the same."""
    v: jax.Array

    def put(self, k_BTKH: jax.Array, v_BTKH: jax.Array, start: jax.Array) -> "PackedKV":
        """With new keys and values in the slots from `start` on, the same ones of all rows."""
        insert = jax.lax.dynamic_update_slice_in_dim
        new = (k_BTKH.astype(self.k.dtype), v_BTKH.astype(self.v.dtype))
        return PackedKV(*(insert(old, x, start, axis=1) for old, x in zip(self, new, strict=True)))


class TriedRing(NamedTuple):
    """A ring, and new keys and values of which it is not known yet how many will stay."""

    old: KV
    new: KV
    """[B, T, K, H]."""


def is_ring(state: KV, window: int | None) -> bool:
    """Whether slots are used again."""
    return window is not None and state.k.shape[1] == window


def write(state: KV, k_BTKH: jax.Array, v_BTKH: jax.Array, decoding: Decoding, ring: bool) -> KV:
    """The new tokens that count at their slots: those that fit, or the last ones in a ring."""
    (B, S), T = state.k.shape[:2], k_BTKH.shape[1]
    token_T = jnp.arange(T, dtype=jnp.int32)
    slot_BT = decoding.start[:, None] + token_T
    count_B1 = (decoding.end - decoding.start)[:, None]
    kept_BT = token_T < count_B1
    if ring:
        kept_BT &= token_T >= count_B1 - S
        slot_BT %= S
    slot_BT = jnp.where(kept_BT, slot_BT, S + token_T)
    rows_B1 = jnp.arange(B, dtype=jnp.int32)[:, None]

    def put(all_BSKH: jax.Array, new_BTKH: jax.Array) -> jax.Array:
        new_BTKH = new_BTKH.astype(all_BSKH.dtype)
        return all_BSKH.at[rows_B1, slot_BT].set(new_BTKH, mode="drop", unique_indices=True)

    return KV(put(state.k, k_BTKH), put(state.v, v_BTKH))


def commit(tried: KV | TriedRing, decoding: Decoding) -> KV:
    """The state with the tokens of a trial that count. Where slots are not used again, those behind
    `decoding.end` are dead already."""
    if isinstance(tried, KV):
        return tried
    return write(tried.old, *tried.new, decoding, ring=True)


def whole_context(S: int, positions_BT: jax.Array, decoding: Decoding) -> Context:
    """Who sees the S slots after the new tokens were written."""
    B, T = positions_BT.shape
    slots_S = jnp.arange(S, dtype=jnp.int32)
    since_BS = jnp.maximum(slots_S - decoding.start[:, None], 0)
    return Context(
        until=jnp.where(slots_S < decoding.end[:, None], T, 0).astype(jnp.int32),
        since=jnp.zeros_like(since_BS) if decoding.both_sides else since_BS,
        positions=positions_BT,
        key_positions=jnp.broadcast_to(slots_S, (B, S)),
    )


def ring_context(S: int, positions_BT: jax.Array, decoding: Decoding) -> Context:
    """Who sees the S slots before anything is written, and behind them the T new keys."""
    B, T = positions_BT.shape
    token_T = jnp.arange(T, dtype=jnp.int32)
    newest_B1 = decoding.start[:, None] - 1
    # The newest token of each slot; below 0 there is none.
    old_BS = newest_B1 - (newest_B1 - jnp.arange(S, dtype=jnp.int32)) % S
    new_BT = token_T < (decoding.end - decoding.start)[:, None]
    seen = jnp.concatenate([old_BS >= 0, new_BT], axis=1)
    since_T = jnp.concatenate([jnp.zeros(S, jnp.int32), token_T])
    return Context(
        until=jnp.where(seen, T, 0).astype(jnp.int32),
        since=jnp.broadcast_to(since_T, (B, S + T)),
        positions=positions_BT,
        key_positions=jnp.concatenate([jnp.maximum(old_BS, 0), positions_BT], axis=1),
    )
