"""Attention's state while decoding: keys and values, of all tokens or of the last ones.

A token at position p takes slot p of S. A layer with a window has at most as many slots as its
window. If it has exactly that many, it is a ring: position p takes slot p % S.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtrain_kernels import Context

from jaxtrain.layers import fp8
from jaxtrain.layers.linear import Dtype
from jaxtrain.layers.mixer import Decoding, LayerInputs, LayerSpec

Stored = Literal["default", "int8", "fp8"]
"""Storage of keys and values while decoding: in their own dtype, or in 8 bits."""
CODES = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn}

FEW = 32
"""Largest number of new tokens per row that `decode_attention` reads the cache for, query by query;
more are a prompt, for which matmuls over all keys are faster."""


class KV(NamedTuple):
    """Keys and values of the tokens so far."""

    k: jax.Array
    """[B, S, K, H], and v the same."""
    v: jax.Array

    def new(self, k_BTKH: jax.Array, v_BTKH: jax.Array) -> "KV":
        """Keys and values of more tokens in the same storage."""
        return KV(k_BTKH, v_BTKH)

    def read(self, dtype: Dtype) -> tuple[jax.Array, jax.Array]:
        """Return (k, v) as attention reads them, in `dtype` where they are stored in 8 bits."""
        return self.k, self.v

    @property
    def scales(self) -> dict[str, jax.Array]:
        """Keyword arguments of `decode_attention` that depend on the storage."""
        return {}


class StoredKV(NamedTuple):
    """Keys and values in 8 bits, with a scale per token and head.

    With scales shared between tokens, adding a token would change the values of earlier ones.
    """

    k: jax.Array
    """int8 or float8_e4m3fn [B, S, K, H], and v the same."""
    v: jax.Array
    k_scale: jax.Array
    """float32 [B, S, K], and v_scale the same."""
    v_scale: jax.Array

    def new(self, k_BTKH: jax.Array, v_BTKH: jax.Array) -> "StoredKV":
        """Quantize keys and values of more tokens."""
        (k, k_scale), (v, v_scale) = (store(x, self.k.dtype) for x in (k_BTKH, v_BTKH))
        return StoredKV(k, v, k_scale, v_scale)

    def read(self, dtype: Dtype) -> tuple[jax.Array, jax.Array]:
        """Return (k, v), dequantized to `dtype`."""
        k, v = (
            (codes.astype(jnp.float32) * scale[..., None]).astype(dtype)
            for codes, scale in ((self.k, self.k_scale), (self.v, self.v_scale))
        )
        return k, v

    @property
    def scales(self) -> dict[str, jax.Array]:
        """Keyword arguments of `decode_attention`, which dequantizes in registers."""
        return {"k_scale": self.k_scale, "v_scale": self.v_scale}


def empty(shape: tuple[int, int, int, int], dtype: Dtype, stored: Stored) -> KV | StoredKV:
    """Return empty storage for [B, S, K, H] keys and values that are computed in `dtype`."""
    if stored == "default":
        return KV(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
    codes, scale = (jnp.zeros(shape, CODES[stored]), jnp.zeros(shape[:-1], jnp.float32))
    return StoredKV(codes, codes, scale, scale)


def store(x_BTKH: jax.Array, dtype: Dtype) -> tuple[jax.Array, jax.Array]:
    """Return (codes, scale [B, T, K]) with codes * scale = x rounded to nearest.

    int8: the largest magnitude of a head becomes 127. FP8: the scale is a power of two.
    """
    if dtype != jnp.int8:
        codes, scale = fp8.quantize(x_BTKH, jnp.dtype(dtype).name, axis=-1)
        return codes, scale[..., 0].astype(jnp.float32)
    wide = x_BTKH.astype(jnp.float32)
    scale = jnp.abs(wide).max(-1) / 127
    # A head of zeros keeps scale 0, which restores exact zeros; only the division avoids it.
    codes = jnp.round(wide / jnp.where(scale > 0, scale, 1.0)[..., None])
    return codes.astype(jnp.int8), scale


class PackedKV(NamedTuple):
    """Keys and values of packed rows and of continuations from any of their tokens.

    A slot does not stand for a position; the context alone defines which queries see it.
    """

    k: jax.Array
    """[B, S, K, H], and v the same."""
    v: jax.Array

    def put(self, k_BTKH: jax.Array, v_BTKH: jax.Array, start: jax.Array) -> "PackedKV":
        """Write new keys and values to the slots from `start` on, the same slots of all rows."""
        return PackedKV(put_packed(self.k, k_BTKH, start), put_packed(self.v, v_BTKH, start))


class TrialRing(NamedTuple):
    """A ring, and keys and values of new tokens of which an unknown number will be accepted."""

    old: KV | StoredKV
    new: KV | StoredKV
    """[B, T, K, H]."""


class RoundedKV(NamedTuple):
    """Keys and values of new tokens, rounded as the cache stores them, and the cache."""

    k: jax.Array
    """[B, T, K, H], of packed rows [B, S, K, H], and v the same."""
    v: jax.Array
    before: KV | StoredKV | None
    """Cache without the new tokens; None in training and for packed rows."""
    after: KV | StoredKV | TrialRing | PackedKV | None
    """Cache with the new tokens; None in training."""


def add_to_cache(
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    inputs: LayerInputs,
    state: KV | StoredKV | PackedKV | None,
) -> RoundedKV:
    """Return what queries of the new tokens attend to; state: the cache, None in training.

    The new tokens are read back in their stored precision, so that a prompt's hidden states do not
    depend on whether its keys are read now or, in a later call, from the cache.
    """
    if state is None:
        return RoundedKV(k_BTKH, v_BTKH, None, None)
    if isinstance(state, PackedKV):
        put = state.put(k_BTKH, v_BTKH, inputs.decoding.start[0])
        return RoundedKV(*put, None, put)
    ring, new = is_ring(state, inputs.spec.window), state.new(k_BTKH, v_BTKH)
    k_BTKH, v_BTKH = new.read(k_BTKH.dtype)
    if ring and inputs.trial:
        # Each new token would overwrite the slot of an old one, which is needed again if the new
        # token is rejected.
        return RoundedKV(k_BTKH, v_BTKH, state, TrialRing(state, new))
    return RoundedKV(k_BTKH, v_BTKH, state, write(state, new, inputs.decoding, ring))


def is_ring(state: KV | StoredKV, window: int | None) -> bool:
    """True if slots are reused."""
    return window is not None and state.k.shape[1] == window


def write(state: Any, new: Any, decoding: Decoding, ring: bool) -> Any:
    """Write the new tokens that count, [B, T, ...] in the same storage, to their slots of a cache:
    those that fit, or the last ones in a ring."""
    return jax.tree.map(lambda old, x: put_new(old, x, decoding, ring), state, new)


def put_new(
    old_BSX: jax.Array, new_BTX: jax.Array, decoding: Decoding, ring: bool = False
) -> jax.Array:
    """Write new tokens [B, T, ...] to one array [B, S, ...] of a cache; see `write`."""
    (B, S), T = old_BSX.shape[:2], new_BTX.shape[1]
    token_T = jnp.arange(T, dtype=jnp.int32)
    slot_BT = decoding.start[:, None] + token_T
    count_B1 = (decoding.end - decoding.start)[:, None]
    counts_BT = token_T < count_B1
    if ring:
        # Of more tokens than slots only the last S are written: scatters with repeated indices
        # have no defined order.
        counts_BT &= token_T >= count_B1 - S
        slot_BT %= S
    # Dropped tokens go to distinct slots out of range, so that indices are unique as promised.
    slot_BT = jnp.where(counts_BT, slot_BT, S + token_T)
    rows_B1 = jnp.arange(B, dtype=jnp.int32)[:, None]
    new_BTX = new_BTX.astype(old_BSX.dtype)
    return old_BSX.at[rows_B1, slot_BT].set(new_BTX, mode="drop", unique_indices=True)


def put_packed(old_BSX: jax.Array, new_BTX: jax.Array, start: jax.Array) -> jax.Array:
    """Write new tokens to the slots from `start` on, the same slots of all rows."""
    new_BTX = new_BTX.astype(old_BSX.dtype)
    return jax.lax.dynamic_update_slice_in_dim(old_BSX, new_BTX, start, axis=1)


def commit(tried: KV | StoredKV | TrialRing, decoding: Decoding) -> KV | StoredKV:
    """Return the state with the tokens of a trial that count."""
    if not isinstance(tried, TrialRing):
        # No query sees slots from `decoding.end` on, and the next tokens overwrite them.
        return tried
    return write(tried.old, tried.new, decoding, ring=True)


PLAIN = LayerSpec()


def visible_slots(
    S: int, T: int, decoding: Decoding, spec: LayerSpec = PLAIN
) -> tuple[jax.Array, jax.Array]:
    """Return int32 [B, T] `until` and `since`: the slots, of S, that each of T new tokens sees
    after they are written. In a ring all slots are within the window, in whatever order; those of
    a chunk are the first."""
    first_B1, end_B1 = decoding.start[:, None], decoding.end[:, None]
    stop_BT = first_B1 + jnp.arange(1, T + 1, dtype=jnp.int32)
    until_BT = stop_BT if decoding.horizon is None else decoding.horizon[:, None]
    counts_BT = stop_BT <= end_B1
    if spec.chunked:
        begin_BT = (stop_BT - 1) // spec.window * spec.window
        first_BT = begin_BT if S == spec.window else 0
        return jnp.where(counts_BT, stop_BT - first_BT, 0), begin_BT - first_BT
    until_BT = jnp.where(counts_BT, jnp.minimum(until_BT, S), 0)
    return until_BT, jnp.maximum(until_BT - (spec.window or S), 0)


def end_in_chunks(context: Context, size: int) -> Context:
    """Return the mask for a kernel with a window of `size` positions in which queries see no
    further back than the last multiple of it: they stand at the end of their chunk."""
    keys_BS = context.positions if context.key_positions is None else context.key_positions
    last_BT = context.positions // size * size + size - 1
    return context._replace(positions=last_BT, key_positions=keys_BS)


def cache_context(
    S: int, positions_BT: jax.Array, decoding: Decoding, since_BT: jax.Array | None = None
) -> Context:
    """Build the mask of T queries and S slots after the new tokens are written. since: the first
    new token that sees each of them; None: that token itself."""
    B, T = positions_BT.shape
    slots_S = jnp.arange(S, dtype=jnp.int32)
    since_BS = jnp.maximum(slots_S - decoding.start[:, None], 0)
    if since_BT is not None:
        new_BS = jnp.take_along_axis(since_BT, jnp.minimum(since_BS, T - 1), axis=1)
        since_BS = jnp.where(slots_S < decoding.start[:, None], 0, new_BS)
    stop_B = decoding.end if decoding.horizon is None else decoding.horizon
    return Context(
        until=jnp.where(slots_S < stop_B[:, None], T, 0).astype(jnp.int32),
        since=since_BS if decoding.horizon is None else jnp.zeros_like(since_BS),
        positions=positions_BT,
        key_positions=jnp.broadcast_to(slots_S, (B, S)),
    )


def ring_context(
    S: int, positions_BT: jax.Array, decoding: Decoding, since_BT: jax.Array | None = None
) -> Context:
    """Build the mask of T queries and T + S keys: the S slots of a ring before the new tokens are
    written, followed by the new tokens. since: as for `cache_context`."""
    B, T = positions_BT.shape
    token_T = jnp.arange(T, dtype=jnp.int32)
    newest_B1 = decoding.start[:, None] - 1
    # Position of the token in each slot, the newest p with p % S == slot; negative if empty.
    old_BS = newest_B1 - (newest_B1 - jnp.arange(S, dtype=jnp.int32)) % S
    new_BT = token_T < (decoding.end - decoding.start)[:, None]
    seen = jnp.concatenate([old_BS >= 0, new_BT], axis=1)
    if since_BT is None:
        since_BT = jnp.broadcast_to(token_T, (B, T))
    return Context(
        until=jnp.where(seen, T, 0).astype(jnp.int32),
        since=jnp.concatenate([jnp.zeros_like(old_BS), since_BT], axis=1),
        positions=positions_BT,
        key_positions=jnp.concatenate([jnp.maximum(old_BS, 0), positions_BT], axis=1),
    )
