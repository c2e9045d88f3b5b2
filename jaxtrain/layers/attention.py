"""Attention: grouped-query self-attention over packed forests; its state is a KV cache.

The mask is data, not code: a `Context` built from the Batch in training, from the cache in
decoding. The kernel sees local arrays only: sharded_attention.py.
"""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtrain_kernels import Context, rotate_heads
from typing_extensions import override

from jaxtrain.distributed.sharding import constrain
from jaxtrain.layers.fused_linear import fuse_kernels, fused_product, multiply_fused
from jaxtrain.layers.kv_cache import (
    FEW,
    KV,
    PackedKV,
    RoundedKV,
    Stored,
    StoredKV,
    add_to_cache,
    cache_context,
    commit,
    empty,
    end_in_chunks,
    is_ring,
    ring_context,
    visible_slots,
)
from jaxtrain.layers.linear import Dtype, LayerInit, Linear
from jaxtrain.layers.mixer import Decoding, LayerInputs, LayerSpec, Mixer, SharedKV, State
from jaxtrain.layers.norm import RMSNorm, UnitRMSNorm
from jaxtrain.layers.rope import Angles, PositionScale, rotate
from jaxtrain.layers.sharded_attention import attend, attend_cached, rotate_shards


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """Choices of a family, in the order in which they act on queries, keys and values."""

    num_in: int | None = None
    """Features that queries, keys and values are projected from; None: D."""
    qkv_bias: bool = False
    values: Literal["own", "keys"] = "own"
    """Project values with their own kernel, or use the keys before norm and rotation (Gemma 4)."""
    qk_norm: Literal["head", "all_heads", "rotated_head"] | None = None
    """Norm of queries and keys: "all_heads" over the N H or K H numbers of a token, before `clip`
    (OLMo 2); "head" over the H numbers of each head (Qwen3); "rotated_head" likewise, after the
    rotation (Hunyuan)."""
    norm: type[RMSNorm] = RMSNorm
    eps: float = 1e-6
    clip: float | None = None
    """Clip queries, keys and values to [-clip, clip] (OLMoE)."""
    value_dim: int | None = None
    """Dims of a value, padded to H for kernel and cache (MiMo); None: H."""
    value_scale: float = 1.0
    """Factor on values."""
    v_norm: bool = False
    """Normalize the values of each head, without a weight (Gemma 4)."""
    adjacent: bool = False
    """Rotate pairs of adjacent dims instead of dims H/2 apart."""
    position_scale: PositionScale | None = None
    """Multiply queries by a factor that grows with their position (Ministral 3)."""
    imports: bool = False
    """Attend to the keys and values that an earlier layer exports; the layer has none of its own
    (Gemma 4)."""
    scale: float | None = None
    """Factor on scores; None: H**-0.5."""
    softcap: float | None = None
    sinks: bool = False
    """Add a trained score without a value to each head's softmax (gpt-oss)."""
    impl: str = "auto"
    """Backend of attention."""
    output_gate: Literal["joint", "own", "head"] | None = None
    """Multiply the heads' outputs by sigmoid gates [N, H], which the q kernel computes next to each
    head's queries ("joint", Qwen3-Next), or an "own" kernel `gate` (AFMoE); "head": that kernel
    computes one gate for each head (LFM3)."""
    out_bias: bool = False
    linear: type[Linear] = Linear
    """Class of the layer's matrices."""


class Attention(Mixer):
    """[B, T, D] -> [B, T, D] with N query heads on K <= N key-value heads of H dims."""

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
        options: AttentionOptions,
        *,
        init: LayerInit,
    ):
        linear = functools.partial(options.linear, init=init)
        query_dim, kv_dim = num_heads * head_dim, num_kv_heads * head_dim
        self.value_dim, self.value_scale = options.value_dim or head_dim, options.value_scale
        assert self.value_dim <= head_dim, "values are padded to the dims of keys"
        num_in = num_features if options.num_in is None else options.num_in
        self.imports, self.qk_norm, self.clip = options.imports, options.qk_norm, options.clip
        self.adjacent, self.position_scale = options.adjacent, options.position_scale
        self.output_gate, self.impl = options.output_gate, options.impl
        self.softcap, self.scale = options.softcap, options.scale
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        # Modules are created in this order, which decides the random initialization.
        self.q = linear(
            num_in,
            2 * query_dim if self.output_gate == "joint" else query_dim,
            axes=("embed", "heads"),
            use_bias=options.qkv_bias,
        )
        kv_linear = functools.partial(
            linear, num_in, axes=("embed", "kv_heads"), use_bias=options.qkv_bias
        )
        shared = self.imports or options.values == "keys"
        self.k = None if self.imports else kv_linear(kv_dim)
        self.v = None if shared else kv_linear(num_kv_heads * self.value_dim)
        self.out = linear(
            num_heads * self.value_dim,
            num_features,
            axes=("heads", "embed"),
            use_bias=options.out_bias,
        )
        gates = {"own": query_dim, "head": num_heads}.get(self.output_gate or "")
        self.gate = None if gates is None else linear(num_in, gates, axes=("embed", "heads"))
        widths = (query_dim, kv_dim) if self.qk_norm == "all_heads" else (head_dim, head_dim)
        norm = functools.partial(options.norm, eps=options.eps, param_dtype=init.param_dtype)
        self.q_norm = norm(widths[0]) if self.qk_norm else None
        self.k_norm = norm(widths[1]) if self.qk_norm and not self.imports else None
        self.v_norm = UnitRMSNorm(head_dim, eps=options.eps) if options.v_norm else None
        # At least float32, as the kernels add sinks to scores that are float32.
        zeros_N = jnp.zeros((num_heads,), jnp.promote_types(init.param_dtype, jnp.float32))
        self.sinks = nnx.Param(zeros_N, axes=("heads",)) if options.sinks else None
        self.stored: Stored = "default"
        """Storage of the state's keys and values; set by `store_cache`."""
        self.rings = True
        """Slots of a layer with a window are used again; else position p has slot p."""

    @override
    def init_state(
        self, spec: LayerSpec, rows: int, slots: int, dtype: Dtype
    ) -> KV | StoredKV | tuple[()]:
        if self.imports:
            return ()
        if spec.window is not None:
            # A layer with a window needs no more slots than the window has: they become a ring.
            # Where there is none, exactly as many slots must not look like one.
            slots = min(slots, spec.window) if self.rings else slots + (slots == spec.window)
        return empty((rows, slots, self.num_kv_heads, self.head_dim), dtype, self.stored)

    @override
    def init_packed(
        self, spec: LayerSpec, rows: int, slots: int, dtype: Dtype
    ) -> PackedKV | tuple[()]:
        if self.imports:
            return ()
        shape = (rows, slots, self.num_kv_heads, self.head_dim)
        return PackedKV(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

    @override
    def grow_state(self, spec: LayerSpec, state: State, rows: int, slots: int) -> State:
        return () if self.imports else super().grow_state(spec, state, rows, slots)

    @override
    def mixing_flops(self, spec: LayerSpec, spans: np.ndarray) -> float:
        # QK and PV, 2 FLOPs each for every visible pair, head and dim.
        pairs = spans if spec.window is None else np.minimum(spans, spec.window)
        if spec.chunked:
            pairs = (spans - 1) % spec.window + 1
        return 4.0 * self.num_heads * self.head_dim * int(pairs.sum())

    @override
    def commit_state(self, spec: LayerSpec, tried: State, decoding: Decoding) -> State:
        return () if self.imports else commit(tried, decoding)

    def __call__(
        self, x_BTD: jax.Array, inputs: LayerInputs, state: State = None
    ) -> tuple[jax.Array, State | SharedKV]:
        q_BTNH, k_BTKH, v_BTKH, gate_BTNH = self.read(
            x_BTD, inputs.angles, inputs.context.positions
        )
        if self.imports:
            rounded = inputs.imported
        else:
            rounded = add_to_cache(k_BTKH, v_BTKH, inputs, state)
            # The rounded values too: a layer that imports them must see what a cache would return.
            state = SharedKV(rounded.after, rounded) if inputs.spec.exports else rounded.after
        return self.write(self._attend(q_BTNH, rounded, inputs), gate_BTNH), state

    def read(
        self, x_BTD: jax.Array, angles: Angles | None, positions_BT: jax.Array
    ) -> tuple[jax.Array, jax.Array | None, jax.Array | None, jax.Array | None]:
        """Return (queries [B, T, N, H], keys and values [B, T, K, H], gates [B, T, N, H or
        1]) of each token; None for those the layer lacks."""
        q_BTNH, k_BTKH, v_BTKH, gate_BTNH = self._project(x_BTD, angles)
        if self.position_scale is not None:
            scale_BT = self.position_scale(positions_BT, q_BTNH.dtype)
            q_BTNH = q_BTNH * scale_BT[..., None, None].astype(q_BTNH.dtype)
        return q_BTNH, k_BTKH, v_BTKH, gate_BTNH

    def write(self, out_BTNH: jax.Array, gate_BTNH: jax.Array | None) -> jax.Array:
        """Return the layer's output [B, T, D] of the heads' outputs and gates."""
        if gate_BTNH is not None:
            out_BTNH = out_BTNH * jax.nn.sigmoid(gate_BTNH)
        return self.project_out(out_BTNH)

    def project(
        self, x_BTD: jax.Array, angles: Angles | None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return (queries [B, T, N, H], keys and values [B, T, K, H]), rotated by `angles`."""
        assert not self.output_gate, "callers of project() do not apply the output gate"
        assert self.position_scale is None, "callers of project() do not scale queries by position"
        assert not self.imports, "a layer that imports keys has none to project"
        return self._project(x_BTD, angles)[:3]

    def _project(self, x_BTD: jax.Array, angles: Angles | None):
        """Return the arrays of `project` and gates [B, T, N, H or 1]; None for those that the
        layer lacks."""
        x_BTD = constrain(x_BTD, "rows", "length", "features")
        rotated = self._rotate_fused(x_BTD, angles)
        if rotated is not None:
            return *rotated, None
        linears = self._input_linears()
        products = dict(zip(linears, multiply_fused(x_BTD, *linears.values()), strict=True))
        q_BTF, k_BTF = products["q"], products.get("k")
        # Where values are keys (Gemma 4) both start from the product; only keys are normed and
        # rotated below.
        v_BTF = products.get("v", k_BTF)
        gate_BTNH = products.get("gate")
        if gate_BTNH is not None:
            gate_BTNH = gate_BTNH.reshape(*x_BTD.shape[:2], self.num_heads, -1)
            gate_BTNH = constrain(gate_BTNH, "rows", "length", "act_heads", None)
        if self.output_gate == "joint":
            # Each head's columns are its queries, then its gates.
            qg_BTNF = q_BTF.reshape(*x_BTD.shape[:2], self.num_heads, -1)
            q_BTF, gate_BTNH = jnp.split(qg_BTNF, 2, axis=-1)
        # Over all heads at once, so before they are taken apart.
        if self.qk_norm == "all_heads":
            q_BTF, k_BTF = self.q_norm(q_BTF), self.k_norm(k_BTF)
        qkv = q_BTF, k_BTF, v_BTF
        if self.clip is not None:
            qkv = (jnp.clip(y, -self.clip, self.clip) for y in qkv)
        q_BTNH, k_BTKH, v_BTKH = map(
            self._heads, qkv, (self.head_dim, self.head_dim, self.value_dim)
        )
        if v_BTKH is not None and self._changes_values:
            padding = [(0, 0)] * 3 + [(0, self.head_dim - self.value_dim)]
            v_BTKH = jnp.pad(v_BTKH * jnp.asarray(self.value_scale, v_BTKH.dtype), padding)
        q_BTNH = self._norm_and_rotate(q_BTNH, self.q_norm, angles)
        k_BTKH = self._norm_and_rotate(k_BTKH, self.k_norm, angles)
        if self.v_norm is not None and v_BTKH is not None:
            v_BTKH = self.v_norm(v_BTKH)
        return q_BTNH, k_BTKH, v_BTKH, gate_BTNH

    @property
    def _changes_values(self) -> bool:
        return self.value_dim != self.head_dim or self.value_scale != 1

    def _input_linears(self) -> dict[str, Linear]:
        linears = {name: getattr(self, name) for name in ("q", "k", "v", "gate")}
        return {name: linear for name, linear in linears.items() if linear is not None}

    def fuse_kernels(self) -> None:
        """Fuse the kernels that read the layer's input."""
        fuse_kernels(*self._input_linears().values())

    def _rotate_fused(
        self, x_BTD: jax.Array, angles: Angles | None
    ) -> tuple[jax.Array, jax.Array, jax.Array] | None:
        """Return the arrays of `project` from one kernel that norms and rotates the fused product.

        None if the product is not fused, or if the layer does more than norm and rotation.
        """
        has_other_steps = self.qk_norm == "all_heads" or self.clip is not None or self.output_gate
        if (
            has_other_steps
            or self._changes_values
            or self.v_norm is not None
            or self.k is None
            or self.v is None
        ):
            return None
        if angles is None or not self._rotates_by_op:
            return None
        # None where the kernels are multiplied one by one: joining the results for the op would be
        # a copy.
        product_BTF = fused_product(x_BTD, self.q, self.k, self.v)
        if product_BTF is None:
            return None
        norms, counts = (self.q_norm, self.k_norm), (self.num_heads, self.num_kv_heads)
        scales = [norm.scale[...] for norm in norms] if self.qk_norm else None
        eps = self.q_norm.eps if self.qk_norm else 0.0
        # `impl` names a backend of attention, which this op may lack; only the portable ones count.
        impl = self.impl if self.impl in ("xla", "reference") else "auto"
        return rotate_heads(product_BTF, *angles, counts, self.head_dim, scales, eps=eps, impl=impl)

    @property
    def _rotates_by_op(self) -> bool:
        """True if `rotate_heads` computes the last steps on queries and keys."""
        normed = self.qk_norm in ("head", "rotated_head")
        plain = self.qk_norm == "head" and type(self.q_norm) is RMSNorm
        return not self.adjacent and (plain or not normed)

    def _norm_and_rotate(
        self, x_BTNH: jax.Array | None, norm: RMSNorm | None, angles: Angles | None
    ) -> jax.Array | None:
        if x_BTNH is None:
            return None
        if angles is not None and self._rotates_by_op and self.impl not in ("xla", "reference"):
            scale, eps = (norm.scale[...], norm.eps) if self.qk_norm == "head" else (None, 0.0)
            rotated_BTNH = rotate_shards(x_BTNH, angles, scale, eps)
            if rotated_BTNH is not None:
                return rotated_BTNH
        if self.qk_norm == "head":
            x_BTNH = norm(x_BTNH)
        if angles is not None:
            x_BTNH = rotate(x_BTNH, angles, self.adjacent)
        return norm(x_BTNH) if self.qk_norm == "rotated_head" else x_BTNH

    def project_out(self, out_BTNH: jax.Array) -> jax.Array:
        """[B, T, D] of the heads' outputs."""
        values_BTNV = out_BTNH[..., : self.value_dim]
        y_BTD = self.out(values_BTNV.reshape(*out_BTNH.shape[:2], -1))
        return constrain(y_BTD, "rows", "sequence", "features")

    def score(self) -> dict[str, Any]:
        """Return what shapes the scores besides queries and keys."""
        sinks = None if self.sinks is None else self.sinks[...]
        return {"softcap": self.softcap, "scale": self.scale, "sinks": sinks}

    def _heads(self, x_BTF: jax.Array | None, dims: int | None = None) -> jax.Array | None:
        """Return the heads of `dims` each; None: H."""
        if x_BTF is None:
            return None
        x_BTNH = x_BTF.reshape(*x_BTF.shape[:2], -1, dims or self.head_dim)
        return constrain(x_BTNH, "rows", "length", "act_heads", None)

    def _attend(self, q_BTNH: jax.Array, rounded: RoundedKV, inputs: LayerInputs) -> jax.Array:
        """Return the heads' outputs [B, T, N, H]."""
        window, decoding, score = inputs.spec.window, inputs.decoding, self.score()

        def attend_to(k_BSKH: jax.Array, v_BSKH: jax.Array, context: Context) -> jax.Array:
            if inputs.spec.chunked:
                context = end_in_chunks(context, window)
            return attend(q_BTNH, k_BSKH, v_BSKH, context, window=window, impl=self.impl, **score)

        if rounded.before is None:
            return attend_to(rounded.k, rounded.v, inputs.context)
        T, S = q_BTNH.shape[1], rounded.before.k.shape[1]
        ring, positions_BT = is_ring(rounded.before, window), inputs.context.positions
        since_BT = inputs.context.since
        if isinstance(rounded.after, KV | StoredKV):
            # Several new tokens of a ring may overwrite slots that the first of them still sees.
            if since_BT is None and (T == 1 or (T <= FEW and not ring)):
                until_BT, since_BT = visible_slots(S, T, decoding, inputs.spec)
                cache, cache_options = rounded.after, score | rounded.after.scales
                # In a ring the leader's slots have been overwritten by other tokens.
                cache_options["shared"] = None if ring else decoding.shared
                return attend_cached(q_BTNH, cache.k, cache.v, until_BT, since_BT, **cache_options)
            if not ring:
                k_BSKH, v_BSKH = rounded.after.read(q_BTNH.dtype)
                return attend_to(k_BSKH, v_BSKH, cache_context(S, positions_BT, decoding, since_BT))
        # A ring: attend to its old slots and the new tokens, before these overwrite any slot.
        before = rounded.before.read(rounded.k.dtype)
        k_BSKH, v_BSKH = (
            jnp.concatenate([old, new.astype(old.dtype)], axis=1)
            for old, new in zip(before, (rounded.k, rounded.v), strict=True)
        )
        return attend_to(k_BSKH, v_BSKH, ring_context(S, positions_BT, decoding, since_BT))


def store_cache(model: nnx.Module, stored: Stored) -> int:
    """Set how all attention layers of `model` store keys and values while decoding, in place.

    Returns their number; the states of other layers are unaffected.
    """
    # Subclasses have states of their own layout.
    layers = [node for _, node in nnx.iter_graph(model) if type(node) is Attention]
    for layer in layers:
        layer.stored = stored
    return len(layers)
