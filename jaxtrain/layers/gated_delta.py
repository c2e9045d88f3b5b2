"""GatedDelta: linear attention by the gated delta rule (Yang et al. 2024, arXiv:2412.06464), as
Qwen3-Next has it; its state is a matrix a head, and the tail of a convolution.

    q, k, v = silu(convolution of 4 along the branch (x W));  q, k to unit length
    S = e^g S;  S += k (beta (v - S^T k))^T;  o = S^T q;  y = (RMSNorm(o) * silu(z)) W_out

This file owns the shard_map around the op: a device takes whole rows of some key heads and of the
value heads that read them, also where tokens are cut over the context axis.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtrain_kernels import Context, conv_heads, gated_delta
from jaxtrain_kernels.conv_heads import Hops, hops_of
from jaxtrain_kernels.gated_delta import find_chunks
from typing_extensions import override

from jaxtrain.distributed.sharding import constrain, partition_spec
from jaxtrain.errors import UserError
from jaxtrain.layers.fused_linear import fuse_kernels, fused_product, multiply_fused
from jaxtrain.layers.linear import Dtype, LayerInit, Linear, PreciseLinear
from jaxtrain.layers.mixer import Decoding, LayerInputs, LayerSpec, Mixer
from jaxtrain.layers.norm import GatedRMSNorm
from jaxtrain.layers.recurrent import kept_until, move_tail

EPS = 1e-6  # of the unit length
FORGETS = -1e4
"""Logarithm of a decay that is 0 in every dtype."""


class DeltaState(NamedTuple):
    """State of a row after its last token."""

    tail: jax.Array
    """[B, taps - 1, H, F]: the last inputs of the convolution."""
    S: jax.Array
    """[B, H, R, K, V] in at least float32."""


class DeltaRows(NamedTuple):
    """Packed rows as the rule walks them: see `as_chains`."""

    until: jax.Array
    prev: jax.Array
    lone: jax.Array
    """bool [B, T]."""


class SharedRowState(NamedTuple):
    """Arrays derived from a batch's rows, shared by all layers."""

    rows: DeltaRows
    chunks: tuple[jax.Array, ...] | None
    hops: Hops | None


class DeltaInputs(NamedTuple):
    """Inputs of the rule, by key head."""

    m: jax.Array
    """[B, T, H, F], or [B, T, H F] and maybe more columns: what the convolution reads."""
    g_BTHR: jax.Array
    """Logarithms of the decays."""
    beta_BTHR: jax.Array


class DeltaSizes(NamedTuple):
    """Sizes of a GatedDelta layer."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    taps: int = 4
    """Tokens that the convolution reaches."""


class TrialDeltaState(NamedTuple):
    """A state, and inputs of new tokens of which an unknown number will be accepted."""

    old: DeltaState
    m_BTHF: jax.Array
    g_BTHR: jax.Array
    beta_BTHR: jax.Array


class GatedDelta(Mixer):
    """[B, T, D] -> [B, T, D] with H key heads of K dims and N value heads of V dims, R = N / H of
    them for each key head.

    The columns of `qkv` are grouped by key head: K queries, K keys, R V values. So a share of the
    key heads is a plain cut of every parameter.
    """

    follows_trees = True
    trials = "own"
    preset = "attention"

    def __init__(
        self,
        num_features: int,
        sizes: DeltaSizes,
        *,
        norm_eps: float = 1e-6,
        beta_scale: float = 1.0,
        impl: str = "auto",
        init: LayerInit,
    ):
        """beta_scale: factor on beta; 2 lets states change their sign (negative eigenvalues)."""
        num_key_heads, num_value_heads, key_dim, value_dim, taps = sizes
        inner = num_value_heads * value_dim
        width = 2 * num_key_heads * key_dim + inner
        into = {"axes": ("embed", "heads"), "init": init}
        self.qkv = Linear(num_features, width, **into)
        self.z = Linear(num_features, inner, **into)
        self.b = PreciseLinear(num_features, num_value_heads, **into)
        self.a = PreciseLinear(num_features, num_value_heads, **into)
        conv_F1W = init.normal((width, 1, taps))
        self.conv = nnx.Param(conv_F1W, axes=("heads", None, None))
        # Small, and summed over whole rows: never rounded to the dtype of the other weights.
        wide = jnp.promote_types(init.param_dtype, jnp.float32)
        log_decay_N = _draw_log_decay(init.rngs.params(), num_value_heads, wide)
        self.A_log = nnx.Param(log_decay_N, axes=("heads",))
        self.dt_bias = nnx.Param(jnp.ones((num_value_heads,), init.param_dtype), axes=("heads",))
        self.norm = GatedRMSNorm(value_dim, eps=norm_eps, param_dtype=init.param_dtype)
        self.out = Linear(inner, num_features, axes=("heads", "embed"), init=init)
        self.num_key_heads, self.repeats = num_key_heads, num_value_heads // num_key_heads
        self.key_dim, self.value_dim, self.taps = key_dim, value_dim, taps
        self.impl, self.beta_scale = impl, beta_scale

    @override
    def init_state(self, spec: LayerSpec, rows: int, slots: int, dtype: Dtype) -> DeltaState:
        # Its size does not depend on the number of slots.
        H, R, K, V = self.num_key_heads, self.repeats, self.key_dim, self.value_dim
        tail = jnp.zeros((rows, self.taps - 1, H, 2 * K + R * V), dtype)
        wide = jnp.promote_types(dtype, jnp.float32)
        return DeltaState(tail, jnp.zeros((rows, H, R, K, V), wide))

    @override
    def place_state(
        self, state: DeltaState | TrialDeltaState | None
    ) -> DeltaState | TrialDeltaState | None:
        if state is None:
            return None
        if isinstance(state, TrialDeltaState):
            by_token = (constrain(x, "rows", None, "act_heads", None) for x in state[1:])
            return TrialDeltaState(self.place_state(state.old), *by_token)
        return DeltaState(
            constrain(state.tail, "rows", None, "act_heads", None),
            constrain(state.S, "rows", "act_heads", None, None, None),
        )

    @override
    def mixing_flops(self, spec: LayerSpec, spans: np.ndarray) -> float:
        # Of every token S^T k, k d^T and S^T q, whatever it sees.
        state = self.num_key_heads * self.repeats * self.key_dim * self.value_dim
        return 6.0 * state * len(spans)

    @override
    def find_shared(self, context: Context) -> SharedRowState:
        # The chunks of the rows, and what the convolution reads. On a mesh each device finds those
        # of its own.
        rows, mesh = as_chains(context), jax.sharding.get_abstract_mesh()
        if mesh.empty or mesh.size == 1:
            chunks = find_chunks(rows.until, rows.prev)
            return SharedRowState(rows, chunks, hops_of(context.prev, self.taps))
        return SharedRowState(rows, None, None)

    @override
    def commit_state(
        self, spec: LayerSpec, tried: TrialDeltaState, decoding: Decoding
    ) -> DeltaState:
        # The rule runs again over the tokens that stay, the projections do not.
        T = tried.m_BTHF.shape[1]
        count_B = decoding.end - decoding.start
        until_BT = kept_until(count_B, T)
        rows = SharedRowState(DeltaRows(until_BT, None, None), None, None)
        _, S = self._mix(DeltaInputs(*tried[1:]), rows, None, tried.old)
        return DeltaState(move_tail(tried.old.tail, tried.m_BTHF, count_B), S)

    def __call__(
        self, x_BTD: jax.Array, inputs: LayerInputs, state: DeltaState | None = None
    ) -> tuple[jax.Array, DeltaState | TrialDeltaState | None]:
        context = inputs.context
        if state is None and context.since is not None:
            raise UserError(
                "the layers of linear attention read each token after the one before it; tokens"
                " that see later ones (prefix attention) are not supported for this model"
            )
        x_BTD = constrain(x_BTD, "rows", "length", "features")
        H, R = self.num_key_heads, self.repeats
        m_BTF, z_BTHF, b_BTHR, a_BTHR = self._project(x_BTD, in_place=state is None)
        wide = jnp.promote_types(x_BTD.dtype, jnp.float32)
        rate_HR, bias_HR = (p[...].astype(wide).reshape(H, R) for p in (self.A_log, self.dt_bias))
        # In at least float32: decays are summed over chunks, where a bfloat16 would lose small
        # ones.
        g_BTHR = -jnp.exp(rate_HR) * jax.nn.softplus(a_BTHR.astype(wide) + bias_HR)
        beta_BTHR = jax.nn.sigmoid(b_BTHR.astype(wide))
        if self.beta_scale != 1:
            beta_BTHR = self.beta_scale * beta_BTHR
        if state is None:
            shared = inputs.shared or SharedRowState(as_chains(context), None, None)
            if shared.rows.lone is not None:
                # Lone tokens share a chain, so each must forget the state of the one before.
                g_BTHR = jnp.where(shared.rows.lone[:, :, None, None], FORGETS, g_BTHR)
        else:
            rows = DeltaRows(context.until, context.prev, None)
            shared = SharedRowState(rows, None, None)
        ruled = DeltaInputs(m_BTF, g_BTHR, beta_BTHR)
        out_BTHF, S = self._mix(ruled, shared, context.prev, state)
        by_head = (*x_BTD.shape[:2], H * R, self.value_dim)
        out_BTNV = self.norm(out_BTHF.reshape(by_head), z_BTHF.reshape(by_head))
        y_BTD = self.out(out_BTNV.reshape(*x_BTD.shape[:2], -1))
        y_BTD = constrain(y_BTD, "rows", "sequence", "features")
        if state is None:
            return y_BTD, None
        m_BTHF = m_BTF.reshape(*m_BTF.shape[:2], H, -1)
        if inputs.trial:
            return y_BTD, TrialDeltaState(state, m_BTHF, g_BTHR, beta_BTHR)
        decoding = inputs.decoding
        tail = move_tail(state.tail, m_BTHF, decoding.end - decoding.start)
        return y_BTD, DeltaState(tail, S)

    def _input_linears(self) -> tuple[Linear, ...]:
        return self.qkv, self.z, self.b, self.a

    def fuse_kernels(self) -> None:
        """Fuse the kernels that read the input."""
        fuse_kernels(*self._input_linears())

    def _project(self, x_BTD, in_place: bool):
        """(m [B, T, H F], z, b and a [B, T, H, ...]); in place: with more columns behind those of
        m, if that spares a copy."""
        linears = self._input_linears()
        product_BTF = fused_product(x_BTD, *linears) if in_place else None
        if product_BTF is None:
            m_BTF, *rest = multiply_fused(x_BTD, *linears)
        else:
            m_BTF, widths = product_BTF, [linear.kernel.shape[-1] for linear in linears]
            _, *rest = jax.lax.split(product_BTF, widths, axis=2)
        by_head = (*x_BTD.shape[:2], self.num_key_heads, -1)
        return m_BTF, *(y_BTF.reshape(by_head) for y_BTF in rest)

    def _taps_HFW(self) -> jax.Array:
        """Return the taps of the convolution by key head."""
        return self.conv[...].reshape(self.num_key_heads, -1, self.taps)

    def _mix(self, inputs: DeltaInputs, shared: SharedRowState, before_BT, state):
        """Return (the heads' outputs [B, T, H, R V], the last S or None), on the current mesh.

        before_BT: the convolution's `Context.prev`.
        """
        conv_HFW = self._taps_HFW()
        run = functools.partial(mix_heads, key_dim=self.key_dim, impl=self.impl)
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty or mesh.size == 1:
            return run(inputs, conv_HFW, shared, before_BT, state)
        m_BTHF = inputs.m.reshape(*inputs.m.shape[:2], self.num_key_heads, -1)
        # Whole rows on every device: the recurrence cannot be cut along tokens.
        by_token = partition_spec(("rows", None, "row_heads", None), m_BTHF.shape, mesh)
        row_axes, _, heads, _ = by_token
        of_state = DeltaState(by_token, PartitionSpec(row_axes, heads))
        is_tree = shared.rows.prev is not None
        return jax.shard_map(
            run,
            in_specs=(
                by_token,
                PartitionSpec(heads),
                PartitionSpec(row_axes),
                PartitionSpec(row_axes),
                PartitionSpec() if state is None else of_state,
            ),
            # With `prev` there is no last state; None has no leaves, so any spec fits.
            out_specs=(by_token, PartitionSpec() if is_tree else of_state.S),
            check_vma=False,
        )(inputs._replace(m=m_BTHF), conv_HFW, shared, before_BT, state)


class SplitGatedDelta(GatedDelta):
    """GatedDelta whose queries, keys and values have matrices and convolutions of their own, whose
    rows are grouped by head (OLMo Hybrid)."""

    def __init__(self, num_features: int, sizes: DeltaSizes, *, init: LayerInit, **options: Any):
        super().__init__(num_features, sizes, init=init, **options)
        del self.qkv, self.conv
        keys, values = sizes.num_key_heads * sizes.key_dim, sizes.num_value_heads * sizes.value_dim
        for name, width in (("q", keys), ("k", keys), ("v", values)):
            setattr(self, name, Linear(num_features, width, axes=("embed", "heads"), init=init))
            taps_F1W = init.normal((width, 1, sizes.taps))
            setattr(self, f"{name}_conv", nnx.Param(taps_F1W, axes=("heads", None, None)))

    @override
    def _input_linears(self) -> tuple[Linear, ...]:
        return self.q, self.k, self.v, self.z, self.b, self.a

    @override
    def _project(self, x_BTD, in_place: bool):
        by_head = (*x_BTD.shape[:2], self.num_key_heads, -1)
        products = multiply_fused(x_BTD, *self._input_linears())
        q, k, v, *gates = (y_BTF.reshape(by_head) for y_BTF in products)
        return jnp.concatenate([q, k, v], -1).reshape(*x_BTD.shape[:2], -1), *gates

    @override
    def _taps_HFW(self) -> jax.Array:
        parts = (conv[...] for conv in (self.q_conv, self.k_conv, self.v_conv))
        by_head = (part.reshape(self.num_key_heads, -1, self.taps) for part in parts)
        return jnp.concatenate(list(by_head), axis=1)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _draw_log_decay(key: jax.Array, num_heads: int, dtype: Dtype) -> jax.Array:
    # One program, because apart its functions would be rounded otherwise.
    return jnp.log(jax.random.uniform(key, (num_heads,), dtype, minval=0.01, maxval=16.0))


def as_chains(context: Context) -> DeltaRows:
    """Chain tokens that nothing precedes or follows, such as padding, one behind the
    other: a run of them is one chain, whose tokens must forget what came before.

    Each alone would be a chunk of its own; left out, a document of one token would be, too. In rows
    without `prev` they are the end, but for a first token.
    """
    T = context.until.shape[1]
    index_T = jnp.arange(T, dtype=jnp.int32)
    lone = ~context.real()
    if context.prev is None:
        return DeltaRows(jnp.where(lone & (index_T > 0), 0, context.until), None, None)
    follows = lone & jnp.pad(lone[:, :-1], ((0, 0), (1, 0)))
    end = jax.lax.cummin(jnp.where(lone, T, index_T), axis=1, reverse=True)
    until = jnp.where(lone, end, context.until)
    return DeltaRows(until, jnp.where(follows, index_T - 1, context.prev), lone)


def mix_heads(
    inputs: DeltaInputs, conv_HFW, shared: SharedRowState, before_BT, state, *, key_dim, impl
):
    """Apply the convolution and the rule to the local key heads: see `GatedDelta._mix`."""
    m, g_BTHR, beta_BTHR = inputs
    (B, T), (H, F, _), repeats = m.shape[:2], conv_HFW.shape, g_BTHR.shape[-1]
    N, V = H * repeats, (F - 2 * key_dim) // repeats
    q, k, v = conv_heads(
        m.reshape(B, T, -1),
        conv_HFW,
        key_dim,
        V,
        before_BT,
        tail=None if state is None else state.tail,
        hops=shared.hops,
        eps=EPS,
        # `impl` names a backend of the rule, which this op may lack; only portable ones count.
        impl=impl if impl in ("xla", "reference") else "auto",
    )
    out_BTNV, S = gated_delta(
        q,
        k,
        v,
        g_BTHR.reshape(B, T, N),
        beta_BTHR.reshape(B, T, N),
        shared.rows.until,
        shared.rows.prev,
        state=None if state is None else state.S.reshape(B, N, key_dim, V),
        chunks=shared.chunks,
        impl=impl,
    )
    S = None if S is None else S.reshape(B, H, repeats, key_dim, V)
    return out_BTNV.reshape(B, T, H, -1), S
