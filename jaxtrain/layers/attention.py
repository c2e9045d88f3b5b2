"""Attention: grouped-query self-attention over packed forests; its state is a KV cache.

Who sees whom is data, not code: a `Context` built from the Batch in training, from the cache in
decoding. The kernel sees local arrays only: sharded_attention.py.
"""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtrain_kernels import rotate_heads

from jaxtrain.distributed.sharding import constrain
from jaxtrain.layers.fused_linear import join, multiply_side_by_side, multiply_together
from jaxtrain.layers.kv_cache import (
    FEW,
    KV,
    PackedKV,
    RoundedKV,
    Stored,
    StoredKV,
    commit,
    empty,
    is_ring,
    keep,
    ring_context,
    seen_slots,
    whole_context,
)
from jaxtrain.layers.linear import Dtype, Linear
from jaxtrain.layers.mixer import Decoding, LayerInputs, LayerSpec, Mixer, SharedKV, State
from jaxtrain.layers.norm import RMSNorm, UnitRMSNorm
from jaxtrain.layers.rope import Angles, PositionScale, rotate
from jaxtrain.layers.sharded_attention import attend, attend_cached, rotate_shards


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
    - attention: softmax of scores times `scale`, by default H**-0.5, within `softcap`; with `sinks`
      each head has one more score there, for which there is no value (gpt-oss)
    - `output_gate`: what heads found times the sigmoid of gates [N, H], which "joint" q gives
      beside each head's queries (Qwen3-Next), or an "own" kernel `gate` (AFMoE)

    Values have a kernel of their own; with `values` "keys" they are the keys before all that, and
    with `v_norm` a norm over H without a weight is what they go through. With `takes` the layer has
    neither keys nor values: it looks at those that another one of the same heads handed on, which
    it does where its `LayerSpec.gives` is set (all three: Gemma 4).

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
        values: Literal["own", "keys"] = "own",
        v_norm: bool = False,
        takes: bool = False,
        softcap: float | None = None,
        scale: float | None = None,
        sinks: bool = False,
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
        keys = functools.partial(
            linear, num_in, kv_dim, axes=("embed", "kv_heads"), use_bias=qkv_bias
        )
        self.k = None if takes else keys()
        self.v = None if takes or values == "keys" else keys()
        self.out = linear(query_dim, num_features, axes=("heads", "embed"), use_bias=out_bias)
        self.gate = (
            linear(num_in, query_dim, axes=("embed", "heads")) if output_gate == "own" else None
        )
        widths = (query_dim, kv_dim) if qk_norm == "all_heads" else (head_dim, head_dim)
        self.q_norm, self.k_norm = (
            norm(width, eps=eps, param_dtype=param_dtype) if there else None
            for width, there in zip(widths, (qk_norm, qk_norm and not takes), strict=True)
        )
        self.v_norm = UnitRMSNorm(head_dim, eps=eps) if v_norm else None
        self.takes = takes
        self.qk_norm, self.clip, self.adjacent = qk_norm, clip, adjacent
        self.position_scale = position_scale
        self.output_gate = output_gate
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.softcap, self.scale = softcap, scale
        none_N = jnp.zeros((num_heads,), jnp.promote_types(param_dtype, jnp.float32))
        self.sinks = nnx.Param(none_N, axes=("heads",)) if sinks else None
        self.impl = impl
        self.stored: Stored = "default"
        """How the state keeps keys and values; set by `store_cache`."""

    def init_state(
        self, spec: LayerSpec, rows: int, slots: int, dtype: Dtype
    ) -> KV | StoredKV | tuple[()]:
        """See Mixer; no more slots than the window has."""
        if self.takes:
            return ()
        slots = slots if spec.window is None else min(slots, spec.window)
        return empty((rows, slots, self.num_kv_heads, self.head_dim), dtype, self.stored)

    def init_packed(
        self, spec: LayerSpec, rows: int, slots: int, dtype: Dtype
    ) -> PackedKV | tuple[()]:
        """See Mixer."""
        if self.takes:
            return ()
        shape = (rows, slots, self.num_kv_heads, self.head_dim)
        return PackedKV(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

    def grow_state(self, spec: LayerSpec, state: State, rows: int, slots: int) -> State:
        """See Mixer."""
        return () if self.takes else super().grow_state(spec, state, rows, slots)

    def mixing_flops(self, spec: LayerSpec, spans: np.ndarray) -> float:
        """See Mixer: QK and PV, 2 FLOPs each for every visible pair, head and dim."""
        pairs = spans if spec.window is None else np.minimum(spans, spec.window)
        return 4.0 * self.num_heads * self.head_dim * int(pairs.sum())

    def commit_state(self, spec: LayerSpec, tried: State, decoding: Decoding) -> State:
        """See Mixer."""
        return () if self.takes else commit(tried, decoding)

    def __call__(
        self, x_BTD: jax.Array, inputs: LayerInputs, state: State = None
    ) -> tuple[jax.Array, State | SharedKV]:
        q_BTNH, k_BTKH, v_BTKH, gate_BTNH = self._project(x_BTD, inputs.angles)
        if self.position_scale is not None:
            scale_BT = self.position_scale(inputs.context.positions, q_BTNH.dtype)
            q_BTNH = q_BTNH * scale_BT[..., None, None].astype(q_BTNH.dtype)
        if self.takes:
            kept = inputs.given
        else:
            kept = keep(k_BTKH, v_BTKH, inputs, state)
            state = SharedKV(kept.after, kept) if inputs.spec.gives else kept.after
        out_BTNH = self._look(q_BTNH, kept, inputs)
        if gate_BTNH is not None:
            out_BTNH = out_BTNH * jax.nn.sigmoid(gate_BTNH)
        return self.join(out_BTNH), state

    def project(
        self, x_BTD: jax.Array, angles: Angles | None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(queries [B, T, N, H], keys and values [B, T, K, H]) of features, rotated by `angles`."""
        assert not self.output_gate, "what the heads find is not gated by whoever asks for this"
        assert self.position_scale is None, "nor are their queries scaled by positions"
        assert not self.takes, "there are no keys"
        return self._project(x_BTD, angles)[:3]

    def _project(self, x_BTD: jax.Array, angles: Angles | None):
        """The same and the gates [B, T, N, H]; None for what there is not."""
        x_BTD = constrain(x_BTD, "rows", "length", "features")
        found = self._rotate_together(x_BTD, angles)
        if found is not None:
            return *found, None
        linears = self._into()
        products = multiply_together(x_BTD, *linears.values())
        made = dict(zip(linears, products, strict=True))
        asked_BTF, keys_BTF = made["q"], made.get("k")
        values_BTF = made.get("v", keys_BTF)
        gate_BTNH = self._heads(made.get("gate"))
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
        k_BTKH = self._turn(k_BTKH, self.k_norm, angles)
        if self.v_norm is not None and v_BTKH is not None:
            v_BTKH = self.v_norm(v_BTKH)
        return q_BTNH, k_BTKH, v_BTKH, gate_BTNH

    def _into(self) -> dict[str, Linear]:
        """What the features are multiplied by."""
        found = {name: getattr(self, name) for name in ("q", "k", "v", "gate")}
        return {name: linear for name, linear in found.items() if linear is not None}

    def join_kernels(self) -> None:
        """See `side_by_side.join`."""
        join(*self._into().values())

    def _rotate_together(
        self, x_BTD: jax.Array, angles: Angles | None
    ) -> tuple[jax.Array, jax.Array, jax.Array] | None:
        """What `project` says, in one pass over the product in which queries, keys and values lie
        side by side; None where they do not, or more is done to them than norm and rotation."""
        more = self.qk_norm == "all_heads" or self.clip is not None or self.output_gate
        if more or self.v_norm is not None or self.k is None or self.v is None:
            return None
        if angles is None or not self._rotates_by_op:
            return None
        product_BTF = multiply_side_by_side(x_BTD, self.q, self.k, self.v)
        if product_BTF is None:
            return None
        norms, counts = (self.q_norm, self.k_norm), (self.num_heads, self.num_kv_heads)
        scales = [norm.scale[...] for norm in norms] if self.qk_norm else None
        eps = self.q_norm.eps if self.qk_norm else 0.0
        # `impl` names a backend of attention; of this op it only asks for what XLA runs alone.
        impl = self.impl if self.impl in ("xla", "reference") else "auto"
        return rotate_heads(product_BTF, *angles, counts, self.head_dim, scales, eps=eps, impl=impl)

    @property
    def _rotates_by_op(self) -> bool:
        """Whether `rotate_heads` is what is done to queries and keys last."""
        normed = self.qk_norm in ("head", "rotated_head")
        plain = self.qk_norm == "head" and type(self.q_norm) is RMSNorm
        return not self.adjacent and (plain or not normed)

    def _turn(
        self, x_BTNH: jax.Array | None, norm: RMSNorm | None, angles: Angles | None
    ) -> jax.Array | None:
        """Queries or keys, normed and rotated."""
        if x_BTNH is None:
            return None
        if angles is not None and self._rotates_by_op and self.impl not in ("xla", "reference"):
            scale, eps = (norm.scale[...], norm.eps) if self.qk_norm == "head" else (None, 0.0)
            turned_BTNH = rotate_shards(x_BTNH, angles, scale, eps)
            if turned_BTNH is not None:
                return turned_BTNH
        if self.qk_norm == "head":
            x_BTNH = norm(x_BTNH)
        if angles is not None:
            x_BTNH = rotate(x_BTNH, angles, self.adjacent)
        return norm(x_BTNH) if self.qk_norm == "rotated_head" else x_BTNH

    def join(self, out_BTNH: jax.Array) -> jax.Array:
        """[B, T, D] of what the heads put out."""
        y_BTD = self.out(out_BTNH.reshape(*out_BTNH.shape[:2], -1))
        return constrain(y_BTD, "rows", "sequence", "features")

    def _score(self) -> dict[str, Any]:
        sinks = None if self.sinks is None else self.sinks[...]
        return {"softcap": self.softcap, "scale": self.scale, "sinks": sinks}

    def _heads(self, x_BTF: jax.Array | None) -> jax.Array | None:
        if x_BTF is None:
            return None
        x_BTNH = x_BTF.reshape(*x_BTF.shape[:2], -1, self.head_dim)
        return constrain(x_BTNH, "rows", "length", "act_heads", None)

    def _look(self, q_BTNH: jax.Array, kept: RoundedKV, inputs: LayerInputs) -> jax.Array:
        """What the heads find, [B, T, N, H]."""
        window, decoding, see = inputs.spec.window, inputs.decoding, self._score()
        far = see | {"window": window, "impl": self.impl}
        if kept.before is None:
            return attend(q_BTNH, kept.k, kept.v, inputs.context, **far)
        T, S = q_BTNH.shape[1], kept.before.k.shape[1]
        ring, positions_BT = is_ring(kept.before, window), inputs.context.positions
        if isinstance(kept.after, KV | StoredKV):
            if T == 1 or (T <= FEW and not ring):
                until_BT, since_BT = seen_slots(S, T, decoding, window)
                cache, see = kept.after, see | kept.after.scales
                # In a ring the leader's slots have other tokens by now.
                see["shared"] = None if ring else decoding.shared
                return attend_cached(q_BTNH, cache.k, cache.v, until_BT, since_BT, **see)
            if not ring:
                k_BSKH, v_BSKH = kept.after.read(q_BTNH.dtype)
                context = whole_context(S, positions_BT, decoding)
                return attend(q_BTNH, k_BSKH, v_BSKH, context, **far)
        # The last of the new tokens may take the slots that the first still look at.
        before = kept.before.read(kept.k.dtype)
        k_BSKH, v_BSKH = (
            jnp.concatenate([old, new.astype(old.dtype)], axis=1)
            for old, new in zip(before, (kept.k, kept.v), strict=True)
        )
        context = ring_context(S, positions_BT, decoding)
        return attend(q_BTNH, k_BSKH, v_BSKH, context, **far)


def store_cache(model: nnx.Module, stored: Stored) -> int:
    """Let all attention layers of `model` keep keys and values so while decoding, in place; how
    many there are. Other layers' states stay as they are."""
    layers = [node for _, node in nnx.iter_graph(model) if type(node) is Attention]
    for layer in layers:
        layer.stored = stored
    return len(layers)
