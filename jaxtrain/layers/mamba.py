"""Mamba: a state space layer whose channels forget at rates of their own (Gu and Dao 2023,
arXiv:2312.00752); its state is S numbers a channel, and the tail of a convolution.

    x, z = u W_x, u W_z;  x = silu(convolution of W along the branch (x))
    r, B, C = norms of the parts of x W_select;  dt = softplus(r W_dt + dt_bias)
    H = e^(A dt) H + B (dt x)^T;  y = (C H + D x) * silu(z);  out = y W_out

This file owns the shard_map around the op: a device takes whole rows of some channels, also where
tokens are cut over the context axis.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtrain_kernels import causal_conv, selective_scan
from typing_extensions import override

from jaxtrain.distributed.sharding import constrain, gathered, partition_spec
from jaxtrain.errors import UserError
from jaxtrain.layers.fused_linear import fuse_kernels, multiply_fused
from jaxtrain.layers.linear import Dtype, LayerInit, Linear
from jaxtrain.layers.mamba2 import draw_first_bias
from jaxtrain.layers.mixer import LayerInputs, LayerSpec, Mixer
from jaxtrain.layers.mlp import gated
from jaxtrain.layers.norm import RMSNorm
from jaxtrain.layers.recurrent import move_tail, used_until


class ScanState(NamedTuple):
    """State of a row after its last token."""

    tail: jax.Array
    """[B, taps - 1, F]: the last inputs of the convolution."""
    H: jax.Array
    """[B, S, F] in at least float32."""


class ScanSizes(NamedTuple):
    """Sizes of a Mamba layer and what it has."""

    num_channels: int
    state_dim: int
    step_rank: int
    """Numbers from which the steps of all channels are made."""
    taps: int
    conv_bias: bool
    proj_bias: bool
    """Of the matrices at both ends."""


class ScanInputs(NamedTuple):
    """Operands of the shard_map; D is what goes past the state, H the state before (None: zeros),
    the others are those of the op."""

    x: Any
    dt: Any
    A: Any
    D: Any
    B: Any
    C: Any
    until: Any
    prev: Any
    H: Any


class Mamba(Mixer):
    """[B, T, D] -> [B, T, D] with F channels of S numbers each; r, B and C are normed (Jamba)."""

    follows_trees = True
    preset = "attention"
    state_axes = ("rows", None, "act_heads")

    def __init__(
        self,
        num_features: int,
        sizes: ScanSizes,
        *,
        norm_eps: float,
        impl: str = "auto",
        init: LayerInit,
    ):
        F, S, rank, self.taps, conv_bias, proj_bias = sizes
        linear = functools.partial(Linear, use_bias=proj_bias, init=init)
        self.x = linear(num_features, F, axes=("embed", "heads"))
        self.z = linear(num_features, F, axes=("embed", "heads"))
        self.conv = nnx.Param(init.normal((F, 1, self.taps)), axes=("heads", None, None))
        zeros_F = jnp.zeros((F,), init.param_dtype)
        self.conv_bias = nnx.Param(zeros_F, axes=("heads",)) if conv_bias else None
        self.select = Linear(F, rank + 2 * S, axes=("heads", None), init=init)
        norm = functools.partial(RMSNorm, eps=norm_eps, param_dtype=init.param_dtype)
        self.dt_norm, self.b_norm, self.c_norm = norm(rank), norm(S), norm(S)
        # No Linear: transformers multiplies by it past whatever stands beside it.
        self.dt_kernel = nnx.Param(init.normal((rank, F)), axes=(None, "heads"))
        # Small, and summed over whole rows: never rounded to the dtype of the other weights.
        wide = jnp.promote_types(init.param_dtype, jnp.float32)
        bias_F = draw_first_bias(init.rngs.params(), F, wide)
        self.dt_bias = nnx.Param(bias_F, axes=("heads",))
        log_S = jnp.asarray(np.log(np.arange(1, S + 1)), wide)
        self.A_log = nnx.Param(jnp.broadcast_to(log_S, (F, S)), axes=("heads", None))
        self.D = nnx.Param(jnp.ones((F,), wide), axes=("heads",))
        self.out = linear(F, num_features, axes=("heads", "embed"))
        self.num_channels, self.state_dim, self.step_rank, self.impl = F, S, rank, impl

    @override
    def init_state(self, spec: LayerSpec, rows: int, slots: int, dtype: Dtype) -> ScanState:
        # Its size does not depend on the number of slots.
        wide, F = jnp.promote_types(dtype, jnp.float32), self.num_channels
        tail = jnp.zeros((rows, self.taps - 1, F), dtype)
        return ScanState(tail, jnp.zeros((rows, self.state_dim, F), wide))

    @override
    def mixing_flops(self, spec: LayerSpec, spans: np.ndarray) -> float:
        # Of every token B (dt x)^T and C H, whatever it sees.
        return 4.0 * self.num_channels * self.state_dim * len(spans)

    def fuse_kernels(self) -> None:
        """Fuse the kernels that read the input."""
        fuse_kernels(self.x, self.z)

    def __call__(
        self, u_BTD: jax.Array, inputs: LayerInputs, state: ScanState | None = None
    ) -> tuple[jax.Array, ScanState | None]:
        context = inputs.context
        if state is None and context.since is not None:
            raise UserError(
                "Mamba layers read each token after the one before it; tokens that see later ones"
                " (prefix attention) are not supported for this model"
            )
        u_BTD = constrain(u_BTD, "rows", "length", "features")
        m_BTF, z_BTF = multiply_fused(u_BTD, self.x, self.z)
        m_BTF = constrain(m_BTF, "rows", None, "row_heads")  # whole rows of some channels
        bias = None if self.conv_bias is None else self.conv_bias[...]
        tail = None if state is None else state.tail
        conv_BTF = causal_conv(m_BTF, self.conv[...][:, 0], context.prev, tail, bias)
        y_BTF, H = self._scan(jax.nn.silu(conv_BTF), inputs, state)
        y_BTF = gated(z_BTF, constrain(y_BTF, "rows", "length", "act_heads"), "silu")
        y_BTD = constrain(self.out(y_BTF), "rows", "sequence", "features")
        if state is None:
            return y_BTD, None
        count_B = inputs.decoding.end - inputs.decoding.start
        tail = move_tail(state.tail[:, :, None], m_BTF[:, :, None], count_B)
        return y_BTD, ScanState(tail[:, :, 0], H)

    def _scan(self, x_BTF: jax.Array, inputs: LayerInputs, state: ScanState | None):
        """Return (C H + D x [B, T, F], the last H or None), on the current mesh."""
        context, cuts = inputs.context, [self.step_rank, self.step_rank + self.state_dim]
        until_BT = used_until(context) if state is None else context.until
        selected = constrain(self.select(x_BTF), "rows", None, None)
        r_BTR, B_BTS, C_BTS = jnp.split(selected, cuts, axis=-1)
        r_BTR, B_BTS, C_BTS = self.dt_norm(r_BTR), self.b_norm(B_BTS), self.c_norm(C_BTS)
        wide = jnp.promote_types(x_BTF.dtype, jnp.float32)
        step_BTF = (r_BTR @ gathered(self.dt_kernel, r_BTR.dtype)).astype(wide)
        dt_BTF = jax.nn.softplus(step_BTF + self.dt_bias[...].astype(wide))
        A_SF = -jnp.exp(self.A_log[...].astype(wide)).T
        run = functools.partial(scan_channels, impl=self.impl)
        D_F, H = self.D[...].astype(wide), None if state is None else state.H
        scanned = ScanInputs(x_BTF, dt_BTF, A_SF, D_F, B_BTS, C_BTS, until_BT, context.prev, H)
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty or mesh.size == 1:
            return run(scanned)
        by_token = partition_spec(("rows", None, "row_heads"), x_BTF.shape, mesh)
        rows, _, channels = by_token
        of_state, of_row = PartitionSpec(rows, None, channels), PartitionSpec(rows)
        specs = ScanInputs(
            x=by_token,
            dt=by_token,
            A=PartitionSpec(None, channels),
            D=PartitionSpec(channels),
            B=of_row,
            C=of_row,
            until=of_row,
            prev=of_row,
            H=PartitionSpec() if H is None else of_state,
        )
        behind = PartitionSpec() if context.prev is not None else of_state
        return jax.shard_map(run, in_specs=(specs,), out_specs=(by_token, behind), check_vma=False)(
            scanned
        )


def scan_channels(inputs: ScanInputs, *, impl: str) -> tuple[jax.Array, jax.Array | None]:
    """Apply the recurrence to the local channels: see `Mamba._scan`."""
    x_BTF, dt_BTF, A_SF, D_F, B_BTS, C_BTS, until_BT, prev_BT, H = inputs
    wide = dt_BTF.dtype
    arrays = (x_BTF, dt_BTF, A_SF, B_BTS, C_BTS, until_BT, prev_BT)
    y_BTF, behind = selective_scan(*arrays, state=H, impl=impl)
    past_BTF = jnp.broadcast_to(D_F, dt_BTF.shape)
    if H is None:
        # A document of one token looks like padding and is left out: add its own contribution.
        used_BT = until_BT > jnp.arange(x_BTF.shape[1], dtype=jnp.int32)
        own_BT = (B_BTS.astype(wide) * C_BTS.astype(wide)).sum(-1)
        past_BTF += jnp.where(used_BT, 0.0, own_BT)[..., None] * dt_BTF
    y_BTF = y_BTF.astype(wide) + past_BTF * x_BTF.astype(wide)
    return y_BTF.astype(x_BTF.dtype), behind
