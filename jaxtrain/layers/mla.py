"""LatentAttention: multi-head latent attention (DeepSeek-V2: arXiv:2405.04434, section 2.1).

    c_q = norm(x W_qa);  q = c_q W_qb           (or q = x W_q)     [.., N, P + R]
    c, r = x W_kva;  c = norm(c)                                   [.., C], [.., R]
    k, v = c W_kvb                              a head P, then V   [.., N, P], [.., N, V]
    scores = [q_P | rope(q_R)] . [k | rope(r)]: r is the same for all heads

Keys and values of a token are functions of its latent [c | rope(r)], so only that is cached.
Packed rows and prompts expand it by W_kvb; a few new tokens of a row map their queries into the
latent's space instead, and the heads' outputs back ("absorbed"):

    q' = q_P W_k^T;  scores = [q' | rope(q_R)] . latent;  out = (softmax(scores) c) W_v

Letters: P and R dims of a head's queries and keys without and with rotation, V of its values, C of
the latent of keys and values, L = C + R.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from typing_extensions import override

from jaxtrain.distributed.sharding import constrain
from jaxtrain.layers.fused_linear import fuse_kernels, multiply_fused
from jaxtrain.layers.kv_cache import FEW, cache_context, put_new, put_packed, visible_slots
from jaxtrain.layers.linear import Dtype, LayerInit, Linear
from jaxtrain.layers.mixer import Decoding, LayerInputs, LayerSpec, Mixer
from jaxtrain.layers.norm import RMSNorm
from jaxtrain.layers.rope import Angles, PositionScale, rotate
from jaxtrain.layers.sharded_attention import attend


class Latents(NamedTuple):
    """Latents of earlier tokens: slot p is position p."""

    latent: jax.Array
    """[B, S, L]: normalized c and rotated r."""


class PackedLatents(NamedTuple):
    """Latents of packed rows and of continuations from any of their tokens: no slot stands for a
    position; the context alone defines the mask."""

    latent: jax.Array
    """[B, S, L]."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentOptions:
    """Sizes of latent attention, and in which models differ."""

    plain_dim: int
    rotated_dim: int
    value_dim: int
    query_rank: int | None
    """Features of c_q; None: queries are made of x."""
    latent_rank: int
    eps: float = 1e-6
    """Of the norms of both latents."""
    use_bias: bool = False
    """Biases on W_qa, W_kva and the output."""
    adjacent: bool = True
    """Rotate pairs of adjacent dims, else of dims R/2 apart."""
    scale: float | None = None
    """Factor on scores; None: (P + R)**-0.5."""
    position_scale: PositionScale | None = None
    """Multiply queries by a factor that grows with their position."""
    impl: str = "auto"
    """Backend of attention."""


class LatentAttention(Mixer):
    """[B, T, D] -> [B, T, D] with N heads."""

    follows_trees = True
    both_sides = True
    keeps_packed = True
    state_axes = ("rows", None, None)
    trials = "own"
    preset = "attention"

    def __init__(
        self, num_features: int, num_heads: int, options: LatentOptions, *, init: LayerInit
    ):
        plain_dim, rotated_dim, value_dim = (
            options.plain_dim,
            options.rotated_dim,
            options.value_dim,
        )
        query_rank, latent_rank, use_bias = (
            options.query_rank,
            options.latent_rank,
            options.use_bias,
        )
        linear = functools.partial(Linear, init=init)
        norm = functools.partial(RMSNorm, eps=options.eps, param_dtype=init.param_dtype)
        query_dim = num_heads * (plain_dim + rotated_dim)
        ranked = query_rank is not None
        first = functools.partial(linear, axes=("embed", None), use_bias=use_bias)
        self.q_a = first(num_features, query_rank) if ranked else None
        self.q_norm = norm(query_rank) if ranked else None
        # Kernels on latents are cut along them in storage, as those on features are.
        num_in = query_rank if ranked else num_features
        self.q = linear(num_in, query_dim, axes=("embed", "heads"))
        self.kv_a = first(num_features, latent_rank + rotated_dim)
        self.kv_norm = norm(latent_rank)
        expanded = num_heads * (plain_dim + value_dim)
        self.kv_b = linear(latent_rank, expanded, axes=("embed", "heads"))
        inner_dim = num_heads * value_dim
        self.out = linear(inner_dim, num_features, axes=("heads", "embed"), use_bias=use_bias)
        self.num_heads, self.plain_dim, self.rotated_dim = num_heads, plain_dim, rotated_dim
        self.value_dim, self.latent_rank = value_dim, latent_rank
        self.adjacent, self.position_scale = options.adjacent, options.position_scale
        self.scale = (plain_dim + rotated_dim) ** -0.5 if options.scale is None else options.scale
        self.impl = options.impl

    @override
    def init_state(self, spec: LayerSpec, rows: int, slots: int, dtype: Dtype) -> Latents:
        return Latents(jnp.zeros((rows, slots, self.latent_rank + self.rotated_dim), dtype))

    @override
    def init_packed(self, spec: LayerSpec, rows: int, slots: int, dtype: Dtype) -> PackedLatents:
        return PackedLatents(*self.init_state(spec, rows, slots, dtype))

    @override
    def mixing_flops(self, spec: LayerSpec, spans: np.ndarray) -> float:
        # QK and PV of every visible pair, expanded.
        width = self.plain_dim + self.rotated_dim + self.value_dim
        return 2.0 * self.num_heads * width * int(spans.sum())

    @override
    def commit_state(self, spec: LayerSpec, tried: Latents, decoding: Decoding) -> Latents:
        # Slots behind `decoding.end` are dead already.
        return tried

    def __call__(
        self, x_BTD: jax.Array, inputs: LayerInputs, state: Latents | PackedLatents | None = None
    ) -> tuple[jax.Array, Latents | PackedLatents | None]:
        assert inputs.spec.window is None, "latent attention has no window"
        context, decoding = inputs.context, inputs.decoding
        q_BTNH, latent_BTL = self._project(x_BTD, inputs)
        T, few = q_BTNH.shape[1], False
        if isinstance(state, PackedLatents):
            state = PackedLatents(put_packed(state.latent, latent_BTL, decoding.start[0]))
        elif state is not None:
            few = T <= FEW
            state = Latents(put_new(state.latent, latent_BTL, decoding))
            # Keys are now all slots of the cache, not the new tokens alone.
            context = cache_context(state.latent.shape[1], context.positions, decoding)
        # Absorbing pays for few queries: expanding every slot would read W_kvb once a slot, while
        # for many queries the wider keys cost more than the expansion.
        if few:
            out_BTNV = self._attend_absorbed(q_BTNH, state.latent, decoding)
        else:
            # From the cache once there is one: new tokens see the rounded latents that later ones
            # will.
            k_BSNH, v_BSNV = self._expand(latent_BTL if state is None else state.latent)
            options = {"scale": self.scale, "impl": self.impl}
            out_BTNV = attend(q_BTNH, k_BSNH, v_BSNV, context, **options)
        y_BTD = self.out(out_BTNV.reshape(*out_BTNV.shape[:2], -1))
        return constrain(y_BTD, "rows", "sequence", "features"), state

    def _input_linears(self) -> tuple[Linear, Linear]:
        return self.q if self.q_a is None else self.q_a, self.kv_a

    def fuse_kernels(self) -> None:
        """Fuse the kernels that read the input."""
        fuse_kernels(*self._input_linears())

    def _project(self, x_BTD: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, jax.Array]:
        """(queries [B, T, N, P + R], latents [B, T, L])."""
        x_BTD = constrain(x_BTD, "rows", "length", "features")
        q_BTF, latent_in_BTL = multiply_fused(x_BTD, *self._input_linears())
        if self.q_a is not None:
            q_BTF = self.q(self.q_norm(q_BTF))
        q_BTNH = self._heads(q_BTF)
        plain_BTNP, rotated_BTNR = jnp.split(q_BTNH, [self.plain_dim], axis=-1)
        rotated_BTNR = self._rotate(rotated_BTNR, inputs.angles)
        q_BTNH = jnp.concatenate([plain_BTNP, rotated_BTNR], axis=-1)
        if self.position_scale is not None:
            scale_BT = self.position_scale(inputs.context.positions, q_BTNH.dtype)
            q_BTNH = q_BTNH * scale_BT[..., None, None].astype(q_BTNH.dtype)
        c_BTC, r_BTR = jnp.split(latent_in_BTL, [self.latent_rank], axis=-1)
        r_BTR = self._rotate(r_BTR[:, :, None], inputs.angles)[:, :, 0]
        latent_BTL = jnp.concatenate([self.kv_norm(c_BTC), r_BTR], axis=-1)
        # A remat policy that saves this name expands it again, which is cheap.
        return q_BTNH, checkpoint_name(latent_BTL, "mla_latent")

    def _rotate(self, x_BTNR: jax.Array, angles: Angles | None) -> jax.Array:
        return x_BTNR if angles is None else rotate(x_BTNR, angles, self.adjacent)

    def _expand(self, latent_BSL: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(keys [B, S, N, P + R], values [B, S, N, V]) of latents."""
        c_BSC, r_BSR = jnp.split(latent_BSL, [self.latent_rank], axis=-1)
        kv_BSNF = self._heads(self.kv_b(c_BSC.astype(self.kv_b.dtype)))
        k_BSNP, v_BSNV = jnp.split(kv_BSNF, [self.plain_dim], axis=-1)
        shape = (*k_BSNP.shape[:-1], self.rotated_dim)
        r_BSNR = jnp.broadcast_to(r_BSR.astype(k_BSNP.dtype)[:, :, None], shape)
        return jnp.concatenate([k_BSNP, r_BSNR], axis=-1), v_BSNV

    def _attend_absorbed(self, q_BTNH, latent_BSL, decoding: Decoding) -> jax.Array:
        """[B, T, N, V] of a few new queries a row; W_kvb is read once, not once a slot."""
        # As a matrix, since halves of it are multiplied apart; an adapter or packed kernel is
        # resolved here.
        kernel_CF = self.kv_b.matrix(self.latent_rank)
        kernel_CNF = kernel_CF.reshape(self.latent_rank, self.num_heads, -1)
        keys_CNP, values_CNV = jnp.split(kernel_CNF, [self.plain_dim], axis=-1)
        plain_BTNP, rotated_BTNR = jnp.split(q_BTNH, [self.plain_dim], axis=-1)
        absorbed_BTNC = jnp.einsum("BTNP,CNP->BTNC", plain_BTNP, keys_CNP)
        q_BTNL = jnp.concatenate([absorbed_BTNC, rotated_BTNR], axis=-1)
        q_BTNL = constrain(q_BTNL, "rows", None, "act_heads", None)
        seen = visible_slots(latent_BSL.shape[1], q_BTNH.shape[1], decoding)
        out_BTNC = attend_latents(
            q_BTNL, latent_BSL, *seen, num_values=self.latent_rank, scale=self.scale
        )
        return jnp.einsum("BTNC,CNV->BTNV", out_BTNC, values_CNV)

    def _heads(self, x_BTF: jax.Array) -> jax.Array:
        x_BTNH = x_BTF.reshape(*x_BTF.shape[:2], self.num_heads, -1)
        return constrain(x_BTNH, "rows", "length", "act_heads", None)


def attend_latents(
    q_BTNL: jax.Array,
    latent_BSL: jax.Array,
    until_BT: jax.Array,
    since_BT: jax.Array,
    *,
    num_values: int,
    scale: float,
) -> jax.Array:
    """[B, T, N, C]: softmax attention of a few queries a row on one key a slot, whose first C =
    `num_values` numbers are its value. A query sees the slots from `since` to `until`, int32
    [B, T]; one that sees none returns 0. Softmax and sums in at least float32.

    All heads read the same keys, so these products are matmuls, which the op for a few queries a
    key head has none of.
    """
    wide = jnp.promote_types(q_BTNL.dtype, jnp.float32)
    latent_BSL = latent_BSL.astype(q_BTNL.dtype)
    score_BTNS = jnp.einsum("BTNL,BSL->BTNS", q_BTNL, latent_BSL, preferred_element_type=wide)
    slot_S = jnp.arange(latent_BSL.shape[1], dtype=jnp.int32)
    seen_BTS = (since_BT[..., None] <= slot_S) & (slot_S < until_BT[..., None])
    seen_BT1S = seen_BTS[:, :, None]
    # A finite stand-in for -inf: a query that sees nothing has weights of 0, not NaN.
    score_BTNS = jnp.where(seen_BT1S, score_BTNS * scale, jnp.finfo(wide).min)
    weight_BTNS = jnp.exp(score_BTNS - score_BTNS.max(-1, keepdims=True))
    weight_BTNS = jnp.where(seen_BT1S, weight_BTNS, 0.0)
    total_BTN1 = weight_BTNS.sum(-1, keepdims=True)
    out_BTNC = jnp.einsum(
        "BTNS,BSC->BTNC",
        weight_BTNS.astype(q_BTNL.dtype),
        latent_BSL[..., :num_values],
        preferred_element_type=wide,
    )
    return (out_BTNC / jnp.where(total_BTN1 == 0, 1.0, total_BTN1)).astype(q_BTNL.dtype)
