"""Attention's state while decoding: keys and values, of all tokens or of the last ones.

A token at position p takes slot p of S. A layer with a window keeps no more slots than the window
has; once these are S, slot p % S is used again: a ring.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtrain_kernels import Context

from jaxtrain.layers import fp8
from jaxtrain.layers.linear import Dtype
from jaxtrain.layers.mixer import Decoding, LayerInputs

Stored = Literal["default", "int8", "fp8"]
"""How keys and values are kept while decoding: as they are computed, or in 8 bits."""
CODES = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn}

FEW = 32
"""Most new tokens of a row whose queries read the cache one by one; more are a prompt."""


class KV(NamedTuple):
    """Keys and values that were computed already."""

    k: jax.Array
    """[B, S, K, H], and v the same."""
    v: jax.Array

    def new(self, k_BTKH: jax.Array, v_BTKH: jax.Array) -> "KV":
        """Keys and values of further tokens, stored alike."""
        return KV(k_BTKH, v_BTKH)

    def read(self, dtype: Dtype) -> tuple[jax.Array, jax.Array]:
        """(k, v) to be looked at."""
        return self.k, self.v

    @property
    def scales(self) -> dict[str, jax.Array]:
        """What `decode_attention` must be told of k and v as they are stored."""
        return {}


class StoredKV(NamedTuple):
    """The same in 8 bits: a scale for each token and head, so that no token changes another's."""

    k: jax.Array
    """int8 or float8_e4m3fn [B, S, K, H], and v the same."""
    v: jax.Array
    k_scale: jax.Array
    """float32 [B, S, K], and v_scale the same."""
    v_scale: jax.Array

    def new(self, k_BTKH: jax.Array, v_BTKH: jax.Array) -> "StoredKV":
        """See KV."""
        (k, k_scale), (v, v_scale) = (store(x, self.k.dtype) for x in (k_BTKH, v_BTKH))
        return StoredKV(k, v, k_scale, v_scale)

    def read(self, dtype: Dtype) -> tuple[jax.Array, jax.Array]:
        """See KV; widened to `dtype`."""
        k, v = (
            (codes.astype(jnp.float32) * scale[..., None]).astype(dtype)
            for codes, scale in ((self.k, self.k_scale), (self.v, self.v_scale))
        )
        return k, v

    @property
    def scales(self) -> dict[str, jax.Array]:
        """See KV."""
        return {"k_scale": self.k_scale, "v_scale": self.v_scale}


def empty(shape: tuple[int, int, int, int], dtype: Dtype, stored: Stored) -> KV | StoredKV:
    """Room for [B, S, K, H] of keys and values that are computed in `dtype`."""
    if stored == "default":
        return KV(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
    codes, scale = (jnp.zeros(shape, CODES[stored]), jnp.zeros(shape[:-1], jnp.float32))
    return StoredKV(codes, codes, scale, scale)


def store(x_BTKH: jax.Array, dtype: Dtype) -> tuple[jax.Array, jax.Array]:
    """(codes, scale [B, T, K]) with codes * scale = x to the nearest: the largest magnitude of a
    head becomes 127; in FP8 the scale is a power of two."""
    if dtype != jnp.int8:
        codes, scale = fp8.quantize(x_BTKH, jnp.dtype(dtype).name, axis=-1)
        return codes, scale[..., 0].astype(jnp.float32)
    wide = x_BTKH.astype(jnp.float32)
    scale = jnp.abs(wide).max(-1) / 127
    codes = jnp.round(wide / jnp.where(scale > 0, scale, 1.0)[..., None])
    return codes.astype(jnp.int8), scale


class PackedKV(NamedTuple):
    """Keys and values of packed rows and of what goes on behind any of their tokens: no slot stands
    for a position, and who sees it the context alone says."""

    k: jax.Array
    """[B, S, K, H], and v the same."""
    v: jax.Array

    def put(self, k_BTKH: jax.Array, v_BTKH: jax.Array, start: jax.Array) -> "PackedKV":
        """With new keys and values in the slots from `start` on, the same ones of all rows."""
        return PackedKV(put_packed(self.k, k_BTKH, start), put_packed(self.v, v_BTKH, start))


class TrialRing(NamedTuple):
    """A ring, and new keys and values of which it is not known yet how many will stay."""

    old: KV | StoredKV
    new: KV | StoredKV
    """[B, T, K, H]."""


class RoundedKV(NamedTuple):
    """Keys and values of new tokens, rounded as they are stored, and what was kept of those before
    them."""

    k: jax.Array
    """[B, T, K, H], of packed rows [B, S, K, H], and v the same."""
    v: jax.Array
    before: KV | StoredKV | None
    """None in training and of packed rows."""
    after: KV | StoredKV | TrialRing | PackedKV | None
    """With the new tokens."""


def keep(
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    inputs: LayerInputs,
    state: KV | StoredKV | PackedKV | None,
) -> RoundedKV:
    """What queries of the new tokens look at; state: of those before, None in training."""
    if state is None:
        return RoundedKV(k_BTKH, v_BTKH, None, None)
    if isinstance(state, PackedKV):
        put = state.put(k_BTKH, v_BTKH, inputs.decoding.start[0])
        return RoundedKV(*put, None, put)
    ring, new = is_ring(state, inputs.spec.window), state.new(k_BTKH, v_BTKH)
    k_BTKH, v_BTKH = new.read(k_BTKH.dtype)
    if ring and inputs.trial:
        # Every new token takes the slot of an old one, which may be needed again.
        return RoundedKV(k_BTKH, v_BTKH, state, TrialRing(state, new))
    return RoundedKV(k_BTKH, v_BTKH, state, write(state, new, inputs.decoding, ring))


def is_ring(state: KV | StoredKV, window: int | None) -> bool:
    """Whether slots are used again."""
    return window is not None and state.k.shape[1] == window


def write(state: Any, new: Any, decoding: Decoding, ring: bool) -> Any:
    """A KV or StoredKV with new tokens that count, [B, T, ...] stored alike, at their slots: those
    that fit, or the last ones in a ring."""
    return jax.tree.map(lambda old, x: put_new(old, x, decoding, ring), state, new)


def put_new(
    old_BSX: jax.Array, new_BTX: jax.Array, decoding: Decoding, ring: bool = False
) -> jax.Array:
    """The same of one array [B, S, ...] and what new tokens bring to it."""
    (B, S), T = old_BSX.shape[:2], new_BTX.shape[1]
    token_T = jnp.arange(T, dtype=jnp.int32)
    slot_BT = decoding.start[:, None] + token_T
    count_B1 = (decoding.end - decoding.start)[:, None]
    kept_BT = token_T < count_B1
    if ring:
        kept_BT &= token_T >= count_B1 - S
        slot_BT %= S
    slot_BT = jnp.where(kept_BT, slot_BT, S + token_T)
    rows_B1 = jnp.arange(B, dtype=jnp.int32)[:, None]
    new_BTX = new_BTX.astype(old_BSX.dtype)
    return old_BSX.at[rows_B1, slot_BT].set(new_BTX, mode="drop", unique_indices=True)


def put_packed(old_BSX: jax.Array, new_BTX: jax.Array, start: jax.Array) -> jax.Array:
    """`old` with new tokens in the slots from `start` on, the same ones of all rows."""
    new_BTX = new_BTX.astype(old_BSX.dtype)
    return jax.lax.dynamic_update_slice_in_dim(old_BSX, new_BTX, start, axis=1)


def commit(tried: KV | StoredKV | TrialRing, decoding: Decoding) -> KV | StoredKV:
    """The state with the tokens of a trial that count. Where slots are not used again, those behind
    `decoding.end` are dead already."""
    if not isinstance(tried, TrialRing):
        return tried
    return write(tried.old, tried.new, decoding, ring=True)


def seen_slots(
    S: int, T: int, decoding: Decoding, window: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """int32 [B, T]: up to which of the S slots, and since which, each of T new tokens sees, where
    they are written; a ring holds only what is within the window, wherever."""
    first_B1, end_B1 = decoding.start[:, None], decoding.end[:, None]
    stop_BT = first_B1 + jnp.arange(1, T + 1, dtype=jnp.int32)
    until_BT = end_B1 if decoding.both_sides else stop_BT
    until_BT = jnp.where(stop_BT <= end_B1, jnp.minimum(until_BT, S), 0)
    return until_BT, jnp.maximum(until_BT - (window or S), 0)


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
