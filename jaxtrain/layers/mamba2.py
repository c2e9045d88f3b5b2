"""Mamba2: a state space layer (Dao and Gu 2024, arXiv:2405.21060); its state is a matrix a head,
and the tail of a convolution.

    z, m, dt = x W_in;  x, B, C = silu(convolution of 4 along the branch (m))
    dt = softplus(dt + dt_bias) within limits;  S = e^(A dt) S + dt B x^T;  y = S^T C + D x
    out = RMSNorm(y * silu(z)) W_out, the norm over the heads of a group (or as MambaOptions say)

This file owns the shard_map around the op: a device takes whole rows of some groups, or of some
heads of one, also where tokens are cut over the context axis.
"""

import functools
import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtrain_kernels import causal_conv, ssd
from typing_extensions import override

from jaxtrain.distributed.sharding import constrain, count_ways, mesh_axes, partition_spec
from jaxtrain.errors import UserError
from jaxtrain.layers.linear import Dtype, LayerInit, Linear
from jaxtrain.layers.mixer import Decoding, LayerInputs, LayerSpec, Mixer
from jaxtrain.layers.mlp import gated
from jaxtrain.layers.norm import GroupedRMSNorm
from jaxtrain.layers.recurrent import kept_until, move_tail, used_until

FIRST_STEPS = (1e-3, 1e-1)
"""dt of a new layer: drawn between these, evenly in log."""


class MambaState(NamedTuple):
    """State of a row after its last token."""

    tail: jax.Array
    """[B, taps - 1, G, F]: the last inputs of the convolution."""
    S: jax.Array
    """[B, N, S, P] in at least float32."""


class TrialMambaState(NamedTuple):
    """A state, and inputs of new tokens of which an unknown number will be accepted."""

    old: MambaState
    m_BTGF: jax.Array
    dt_BTN: jax.Array


class MambaSizes(NamedTuple):
    """Sizes of a Mamba-2 layer."""

    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int
    taps: int
    conv_bias: bool
    dt_limit: tuple[float, float]

    def check(self) -> None:
        """UserError where the heads do not divide into groups."""
        if self.num_heads % self.num_groups:
            raise UserError(
                f"config.json: {self.num_heads} Mamba heads must be a multiple of the"
                f" {self.num_groups} groups"
            )


class MambaOptions(NamedTuple):
    """Choices of a family around the recurrence."""

    norm: Literal["gate_first", "gate_last"] | None = "gate_first"
    """Norm of y * silu(z), or of y before it is multiplied by silu(z); None: there is no norm."""
    scales: tuple[float, ...] = (1.0,) * 5
    """Factors on z, x, B, C and dt as `in_proj` returns them (Falcon-H1)."""
    in_bias: bool = False
    out_bias: bool = False


USUAL = MambaOptions()
"""Mamba-2 as it was published."""


class HeadParameters(NamedTuple):
    """Parameters of the heads, split like their activations."""

    conv_GFW: jax.Array
    bias_GF: jax.Array | None
    A_N: jax.Array
    D_N: jax.Array


class Mamba2(Mixer):
    """[B, T, D] -> [B, T, D] with N heads of P dims in G groups, each with B and C of S dims.

    The columns of `in_proj` are grouped: of R = N / G heads z and x, B, C, and dt of these heads.
    So a share of the groups is a plain cut of every parameter.
    """

    follows_trees = True
    trials = "own"
    preset = "attention"

    def __init__(
        self,
        num_features: int,
        sizes: MambaSizes,
        *,
        norm_eps: float = 1e-5,
        impl: str = "auto",
        options: MambaOptions = USUAL,
        init: LayerInit,
    ):
        num_heads, head_dim, num_groups, state_dim, taps, conv_bias, dt_limit = sizes
        inner = num_heads * head_dim
        mixed = inner + 2 * num_groups * state_dim
        columns = inner + mixed + num_heads
        self.in_proj = Linear(
            num_features, columns, axes=("embed", "heads"), use_bias=options.in_bias, init=init
        )
        conv_F1W = init.normal((mixed, 1, taps))
        self.conv = nnx.Param(conv_F1W, axes=("heads", None, None))
        zeros_F = jnp.zeros((mixed,), init.param_dtype)
        self.conv_bias = nnx.Param(zeros_F, axes=("heads",)) if conv_bias else None
        # Small, and summed over whole rows: never rounded to the dtype of the other weights.
        wide = jnp.promote_types(init.param_dtype, jnp.float32)
        decay_N = jnp.arange(1, num_heads + 1, dtype=wide)
        self.A_log = nnx.Param(jnp.log(decay_N), axes=("heads",))
        self.D = nnx.Param(jnp.ones((num_heads,), wide), axes=("heads",))
        bias_N = draw_first_bias(init.rngs.params(), num_heads, wide)
        self.dt_bias = nnx.Param(bias_N, axes=("heads",))
        norm = functools.partial(GroupedRMSNorm, gate_first=options.norm == "gate_first")
        norm = functools.partial(norm, eps=norm_eps, param_dtype=init.param_dtype)
        self.norm = norm(inner, num_groups) if options.norm else None
        self.out_proj = Linear(
            inner, num_features, axes=("heads", "embed"), use_bias=options.out_bias, init=init
        )
        self.num_heads, self.head_dim, self.taps = num_heads, head_dim, taps
        self.num_groups, self.state_dim = num_groups, state_dim
        self.dt_limit, self.impl, self.scales = dt_limit, impl, options.scales

    @override
    def init_state(self, spec: LayerSpec, rows: int, slots: int, dtype: Dtype) -> MambaState:
        # Its size does not depend on the number of slots.
        N, P, G, S = self.num_heads, self.head_dim, self.num_groups, self.state_dim
        tail = jnp.zeros((rows, self.taps - 1, G, N // G * P + 2 * S), dtype)
        return MambaState(tail, jnp.zeros((rows, N, S, P), jnp.promote_types(dtype, jnp.float32)))

    @override
    def place_state(
        self, state: MambaState | TrialMambaState | None
    ) -> MambaState | TrialMambaState | None:
        if state is None:
            return None
        if isinstance(state, TrialMambaState):
            m_BTGF = constrain(state.m_BTGF, "rows", None, "act_heads", None)
            dt_BTN = constrain(state.dt_BTN, "rows", None, "act_heads")
            return TrialMambaState(self.place_state(state.old), m_BTGF, dt_BTN)
        return MambaState(
            constrain(state.tail, "rows", None, "act_heads", None),
            constrain(state.S, "rows", "act_heads", None, None),
        )

    @override
    def mixing_flops(self, spec: LayerSpec, spans: np.ndarray) -> float:
        # Of every token B x^T and S^T C, whatever it sees.
        return 4.0 * self.num_heads * self.head_dim * self.state_dim * len(spans)

    @override
    def commit_state(
        self, spec: LayerSpec, tried: TrialMambaState, decoding: Decoding
    ) -> MambaState:
        # The recurrence runs again over those that stay, the projections do not.
        T = tried.m_BTGF.shape[1]
        count_B = decoding.end - decoding.start
        until_BT = kept_until(count_B, T)
        _, S = self._mix(tried.m_BTGF, tried.dt_BTN, until_BT, None, tried.old)
        return MambaState(move_tail(tried.old.tail, tried.m_BTGF, count_B), S)

    def __call__(
        self, x_BTD: jax.Array, inputs: LayerInputs, state: MambaState | None = None
    ) -> tuple[jax.Array, MambaState | TrialMambaState | None]:
        context = inputs.context
        if state is None and context.since is not None:
            raise UserError(
                "Mamba layers read each token after the one before it; tokens that see later ones"
                " (prefix attention) are not supported for this model"
            )
        x_BTD = constrain(x_BTD, "rows", "length", "features")
        B, T, G = *x_BTD.shape[:2], self.num_groups
        inner = self.num_heads // G * self.head_dim
        grouped_BTGF = self.in_proj(x_BTD).reshape(B, T, G, -1)
        if set(self.scales) != {1.0}:
            sizes = [inner, inner, self.state_dim, self.state_dim, self.num_heads // G]
            grouped_BTGF *= np.repeat(self.scales, sizes).astype(grouped_BTGF.dtype)
        cuts = [inner, 2 * inner + 2 * self.state_dim]
        z_BTGF, m_BTGF, dt_BTGR = jnp.split(grouped_BTGF, cuts, axis=-1)
        wide = jnp.promote_types(x_BTD.dtype, jnp.float32)
        dt_BTN = dt_BTGR.reshape(B, T, -1).astype(wide) + self.dt_bias[...].astype(wide)[None, None]
        dt_BTN = jnp.clip(jax.nn.softplus(dt_BTN), *self.dt_limit)
        if state is None:
            until_BT = used_until(context)
        else:
            until_BT = context.until
        y_BTF, S = self._mix(m_BTGF, dt_BTN, until_BT, context.prev, state)
        z_BTF = z_BTGF.reshape(y_BTF.shape)
        y_BTF = gated(z_BTF, y_BTF, "silu") if self.norm is None else self.norm(y_BTF, z_BTF)
        y_BTD = constrain(self.out_proj(y_BTF), "rows", "sequence", "features")
        if state is None:
            return y_BTD, None
        if inputs.trial:
            return y_BTD, TrialMambaState(state, m_BTGF, dt_BTN)
        decoding = inputs.decoding
        tail = move_tail(state.tail, m_BTGF, decoding.end - decoding.start)
        return y_BTD, MambaState(tail, S)

    def _mix(self, m_BTGF, dt_BTN, until_BT, prev_BT, state):
        """Return (the heads' outputs [B, T, N P], the last S or None), on the current mesh."""
        B, T, G, _ = m_BTGF.shape
        wide = dt_BTN.dtype
        share = HeadParameters(
            self.conv[...].reshape(G, -1, self.taps),
            None if self.conv_bias is None else self.conv_bias[...].reshape(G, -1),
            -jnp.exp(self.A_log[...].astype(wide)),
            self.D[...].astype(wide),
        )
        run = functools.partial(mix_heads, state_dim=self.state_dim, impl=self.impl)
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty or mesh.size == 1:
            return run(m_BTGF, share, dt_BTN, until_BT, prev_BT, state)
        # Where groups are fewer than devices, those that share one each get its B and C.
        ways = count_ways(mesh_axes("row_heads", mesh), mesh)
        parts = ways // math.gcd(ways, G)
        if self.num_heads // G % parts:
            parts = 1
        divide = functools.partial(divide_groups, parts=parts, state_dim=self.state_dim)
        m_BTGF, conv = divide(m_BTGF, axis=2), divide(share.conv_GFW, axis=0)
        bias = None if share.bias_GF is None else divide(share.bias_GF, axis=0)
        share = share._replace(conv_GFW=conv, bias_GF=bias)
        if state is not None:
            state = state._replace(tail=divide(state.tail, axis=2))
        by_token = partition_spec(("rows", None, "row_heads", None), m_BTGF.shape, mesh)
        rows, _, heads, _ = by_token
        of_state = MambaState(by_token, PartitionSpec(rows, heads))
        out_BTF, S = jax.shard_map(
            run,
            in_specs=(
                by_token,
                PartitionSpec(heads),
                PartitionSpec(rows, None, heads),
                PartitionSpec(rows),
                PartitionSpec(rows),
                PartitionSpec() if state is None else of_state,
            ),
            out_specs=(
                PartitionSpec(rows, None, heads),
                PartitionSpec() if prev_BT is not None else of_state.S,
            ),
            check_vma=False,
        )(m_BTGF, share, dt_BTN, until_BT, prev_BT, state)
        return out_BTF, S


def divide_groups(x: jax.Array, *, parts: int, state_dim: int, axis: int) -> jax.Array:
    """Groups along `axis`, whose next dim is that of x, B and C: each as `parts` groups with a
    share of the heads and B and C again."""
    if parts == 1:
        return x
    group_dim = axis + 1
    cut = x.shape[group_dim] - 2 * state_dim
    heads, shared = jnp.split(x, [cut], axis=group_dim)
    shape = (*x.shape[:axis], x.shape[axis] * parts, cut // parts, *x.shape[group_dim + 1 :])
    return jnp.concatenate(
        [heads.reshape(shape), jnp.repeat(shared, parts, axis=axis)], axis=group_dim
    )


def mix_heads(m_BTGF, share: HeadParameters, dt_BTN, until_BT, prev_BT, state, *, state_dim, impl):
    """Apply the convolution and the recurrence to the local groups: see `Mamba2._mix`."""
    B, T, G, F = m_BTGF.shape
    N, wide = dt_BTN.shape[2], dt_BTN.dtype
    tail = None if state is None else state.tail.reshape(B, -1, G * F)
    bias = None if share.bias_GF is None else share.bias_GF.reshape(G * F)
    mixed_BTF = causal_conv(
        m_BTGF.reshape(B, T, G * F), share.conv_GFW.reshape(G * F, -1), prev_BT, tail, bias
    )
    mixed_BTGF = jax.nn.silu(mixed_BTF).reshape(B, T, G, F)
    cuts = [F - 2 * state_dim, F - state_dim]
    x_BTGF, B_BTGS, C_BTGS = jnp.split(mixed_BTGF, cuts, axis=-1)
    # N are the local heads: under shard_map fewer than the layer has.
    x_BTNP = x_BTGF.reshape(B, T, N, -1)
    S = None if state is None else state.S
    y_BTNP, S = ssd(
        x_BTNP, dt_BTN, share.A_N, B_BTGS, C_BTGS, until_BT, prev_BT, state=S, impl=impl
    )
    past_BTN = jnp.broadcast_to(share.D_N, dt_BTN.shape)
    if state is None:
        # A document of one token looks like padding and is left out: add its own contribution.
        used_BT = until_BT > jnp.arange(T, dtype=jnp.int32)
        own_BTG = (B_BTGS.astype(wide) * C_BTGS.astype(wide)).sum(-1)
        own_BTN = jnp.repeat(own_BTG, N // G, axis=2) * dt_BTN
        past_BTN = past_BTN + jnp.where(used_BT[..., None], 0.0, own_BTN)
    y_BTNP = y_BTNP.astype(wide) + past_BTN[..., None] * x_BTNP.astype(wide)
    return y_BTNP.astype(x_BTNP.dtype).reshape(B, T, -1), S


@functools.partial(jax.jit, static_argnums=(1, 2))
def draw_first_bias(key: jax.Array, size: int, dtype: Dtype) -> jax.Array:
    """Draw the bias of steps; the first of these lie in FIRST_STEPS."""
    # One program, because apart its functions would be rounded otherwise.
    low, high = map(math.log, FIRST_STEPS)
    step_N = jnp.exp(jax.random.uniform(key, (size,), dtype, minval=low, maxval=high))
    # The inverse of softplus, so that the first steps are as drawn.
    return step_N + jnp.log(-jnp.expm1(-step_N))
