"""Attention: grouped-query self-attention over packed forests; its state is a KV cache.

Who sees whom is data, not code: a `Context` built from the Batch in training, from the cache in
decoding. The kernel sees local arrays only: sharded_attention.py.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.layers.kv_cache import (
    FEW,
    KV,
    PackedKV,
    TriedRing,
    commit,
    is_ring,
    ring_context,
    seen_slots,
    whole_context,
    write,
)
from jaxtrain.layers.linear import Dtype, Linear, multiply_together
from jaxtrain.layers.mixer import Decoding, LayerInputs, LayerSpec, Mixer
from jaxtrain.layers.norm import RMSNorm
from jaxtrain.layers.rope import Angles, PositionScale, rotate
from jaxtrain.layers.sharded_attention import attend, attend_cached
from jaxtrain.parallel.rules import constrain


class Attention(Mixer):
    """[B, T, D] -> [B, T, D] with N query heads on K <= N key-value heads of H dims.

    What happens to queries, keys and values, in this order, each step only if it is asked for:

    - `qk_norm` "all_heads": a `norm` of `eps` over the N H or K H numbers of a token (OLMo 2)
    - `clip`: queries, keys and values are held within [-clip, clip] (OLMoE)
    - `qk_norm` "head": a norm over the H numbers of each head (Qwen3)
    - rotation, of pairs of `adjacent` dims or of dims H/2 apart; none where the layer has no
      position encoding
    - `qk_norm` "rotated_head": as "head", behind the rotation (Hunyuan)
    - `position_scale`: queries times a factor that grows with their position (Ministral 3)
    - attention: softmax of scores times `scale`, by default H**-0.5, within `softcap`
    - `output_gate`: what heads found times the sigmoid of gates [N, H], which "joint" q gives
      beside each head's queries (Qwen3-Next), or an "own" kernel `gate` (AFMoE)

    `num_in`: features that queries, keys and values are made of, where these are not D.
    """

    follows_trees = True
    both_sides = True
    keeps_packed = True
    state_axes = ("rows", None, "kv_heads", None)
    trials = "own"
    preset = "attention"

    def __init__(
        self,
        num_features: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        qkv_bias: bool = False,
        out_bias: bool = False,
        qk_norm: Literal["head", "all_heads", "rotated_head"] | None = None,
        norm: type[RMSNorm] = RMSNorm,
        eps: float = 1e-6,
        clip: float | None = None,
        adjacent: bool = False,
        position_scale: PositionScale | None = None,
        output_gate: Literal["joint", "own"] | None = None,
        softcap: float | None = None,
        scale: float | None = None,
        impl: str = "auto",
        num_in: int | None = None,
        init_std: float = 0.02,
        param_dtype: Dtype = jnp.float32,
        dtype: Dtype = jnp.float32,
        rngs: nnx.Rngs,
    ):
        linear = functools.partial(
            Linear, init_std=init_std, param_dtype=param_dtype, dtype=dtype, rngs=rngs
        )
        query_dim, kv_dim = num_heads * head_dim, num_kv_heads * head_dim
        num_in = num_features if num_in is None else num_in
        asked_dim = 2 * query_dim if output_gate == "joint" else query_dim
        self.q = linear(num_in, asked_dim, axes=("embed", "heads"), use_bias=qkv_bias)
        self.k = linear(num_in, kv_dim, axes=("embed", "kv_heads"), use_bias=qkv_bias)
        self.v = linear(num_in, kv_dim, axes=("embed", "kv_heads"), use_bias=qkv_bias)
        self.out = linear(query_dim, num_features, axes=("heads", "embed"), use_bias=out_bias)
        self.gate = (
            linear(num_in, query_dim, axes=("embed", "heads")) if output_gate == "own" else None
        )
        widths = (query_dim, kv_dim) if qk_norm == "all_heads" else (head_dim, head_dim)
        self.q_norm, self.k_norm = (
            None if qk_norm is None else norm(width, eps=eps, param_dtype=param_dtype)
            for width in widths
        )
        self.qk_norm, self.clip, self.adjacent = qk_norm, clip, adjacent
        self.position_scale = position_scale
        self.output_gate = output_gate
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.softcap, self.scale = softcap, scale
        self.impl = impl

    def init_state(self, spec: LayerSpec, rows: int, slots: int, dtype: Dtype) -> KV:
        """See Mixer; no more slots than the window has."""
        slots = slots if spec.window is None else min(slots, spec.window)
        shape = (rows, slots, self.num_kv_heads, self.head_dim)
        return KV(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

    def init_packed(self, spec: LayerSpec, rows: int, slots: int, dtype: Dtype) -> PackedKV:
        """See Mixer."""
        shape = (rows, slots, self.num_kv_heads, self.head_dim)
        return PackedKV(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

    def mixing_flops(self, spec: LayerSpec, spans: np.ndarray) -> float:
        """See Mixer: QK and PV, 2 FLOPs each for every visible pair, head and dim."""
        pairs = spans if spec.window is None else np.minimum(spans, spec.window)
        return 4.0 * self.num_heads * self.head_dim * int(pairs.sum())

    def commit_state(self, spec: LayerSpec, tried: KV | TriedRing, decoding: Decoding) -> KV:
        """See Mixer."""
        return commit(tried, decoding)

    def __call__(
        self, x_BTD: jax.Array, inputs: LayerInputs, state: KV | PackedKV | None = None
    ) -> tuple[jax.Array, KV | PackedKV | TriedRing | None]:
        q_BTNH, k_BTKH, v_BTKH, gate_BTNH = self._project(x_BTD, inputs.angles)
        if self.position_scale is not None:
            scale_BT = self.position_scale(inputs.context.positions, q_BTNH.dtype)
            q_BTNH = q_BTNH * scale_BT[..., None, None].astype(q_BTNH.dtype)
        if state is None or isinstance(state, PackedKV):
            if state is not None:
                state = state.put(k_BTKH, v_BTKH, inputs.decoding.start[0])
                k_BTKH, v_BTKH = state
            see = {"window": inputs.spec.window, "impl": self.impl, **self._score()}
            out_BTNH = attend(q_BTNH, k_BTKH, v_BTKH, inputs.context, **see)
        else:
            out_BTNH, state = self._decode(q_BTNH, k_BTKH, v_BTKH, inputs, state)
        if gate_BTNH is not None:
            out_BTNH = out_BTNH * jax.nn.sigmoid(gate_BTNH)
        return self.join(out_BTNH), state

    def project(
        self, x_BTD: jax.Array, angles: Angles | None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(queries [B, T, N, H], keys and values [B, T, K, H]) of features, rotated by `angles`."""
        assert not self.output_gate, "what the heads find is not gated by whoever asks for this"
        assert self.position_scale is None, "nor are their queries scaled by positions"
        return self._project(x_BTD, angles)[:3]

    def _project(self, x_BTD: jax.Array, angles: Angles | None):
        """The same and the gates [B, T, N, H], or None."""
        x_BTD = constrain(x_BTD, "rows", "length", "features")
        gates = [] if self.gate is None else [self.gate]
        asked_BTF, keys_BTF, values_BTF, *gates_BTF = multiply_together(
            x_BTD, self.q, self.k, self.v, *gates
        )
        gate_BTNH = self._heads(gates_BTF[0]) if gates else None
        if self.output_gate == "joint":
            both_BTNF = asked_BTF.reshape(*x_BTD.shape[:2], self.num_heads, -1)
            asked_BTF, gate_BTNH = jnp.split(both_BTNF, 2, axis=-1)
        if self.qk_norm == "all_heads":
            asked_BTF, keys_BTF = self.q_norm(asked_BTF), self.k_norm(keys_BTF)
        found = asked_BTF, keys_BTF, values_BTF
        if self.clip is not None:
            found = (jnp.clip(y, -self.clip, self.clip) for y in found)
        q_BTNH, k_BTKH, v_BTKH = map(self._heads, found)
        q_BTNH = self._turn(q_BTNH, self.q_norm, angles)
        return q_BTNH, self._turn(k_BTKH, self.k_norm, angles), v_BTKH, gate_BTNH

    def _turn(self, x_BTNH: jax.Array, norm: RMSNorm | None, angles: Angles | None) -> jax.Array:
        """Queries or keys, normed and rotated."""
        if self.qk_norm == "head":
            x_BTNH = norm(x_BTNH)
        if angles is not None:
            x_BTNH = rotate(x_BTNH, angles, self.adjacent)
        return norm(x_BTNH) if self.qk_norm == "rotated_head" else x_BTNH

    def join(self, out_BTNH: jax.Array) -> jax.Array:
        """[B, T, D] of what the heads put out."""
        y_BTD = self.out(out_BTNH.reshape(*out_BTNH.shape[:2], -1))
        return constrain(y_BTD, "rows", "sequence", "features")

    def _score(self) -> dict[str, float | None]:
        return {"softcap": self.softcap, "scale": self.scale}

    def _heads(self, x_BTF: jax.Array) -> jax.Array:
        x_BTNH = x_BTF.reshape(*x_BTF.shape[:2], -1, self.head_dim)
        return constrain(x_BTNH, "rows", "length", "act_heads", None)

    def _decode(self, q_BTNH, k_BTKH, v_BTKH, inputs: LayerInputs, state: KV):
        """The new tokens against the cache and each other: (output, the cache with them)."""
        window, decoding, S = inputs.spec.window, inputs.decoding, state.k.shape[1]
        ring = is_ring(state, window)
        if ring and inputs.trial:
            # Every new token takes the slot of an old one, which may be needed again.
            written = TriedRing(state, KV(k_BTKH, v_BTKH))
        else:
            written = write(state, k_BTKH, v_BTKH, decoding, ring)
        see = self._score()
        T = q_BTNH.shape[1]
        if (T == 1 or (T <= FEW and not ring)) and not isinstance(written, TriedRing):
            until_BT, since_BT = seen_slots(S, T, decoding, window)
            return attend_cached(q_BTNH, *written, until_BT, since_BT, **see), written
        see |= {"window": window, "impl": self.impl}
        positions_BT = inputs.context.positions
        if not ring:
            context = whole_context(S, positions_BT, decoding)
            return attend(q_BTNH, *written, context, **see), written
        # The last of the new tokens may take the slots that the first still look at.
        k_BSKH, v_BSKH = (
            jnp.concatenate([old, new.astype(old.dtype)], axis=1)
            for old, new in zip(state, (k_BTKH, v_BTKH), strict=True)
        )
        context = ring_context(S, positions_BT, decoding)
        return attend(q_BTNH, k_BSKH, v_BSKH, context, **see), written
