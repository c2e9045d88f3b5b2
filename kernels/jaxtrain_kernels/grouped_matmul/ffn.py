"""The feed-forward layer of every expert on the tokens that chose it: its definition."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain_kernels.grouped_matmul.routing import combine, gather_gates, gather_in, take_rows
from jaxtrain_kernels.precision import accumulator

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    **dict.fromkeys(
        ("gelu_pytorch_tanh", "gelu_new", "gelu_fast"),
        functools.partial(jax.nn.gelu, approximate=True),
    ),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}


class Clamped(NamedTuple):
    """The activation of gpt-oss, of gate and up together: (u + 1) g sigmoid(alpha g) with g = gate
    held below `limit` and u = up held within +-limit."""

    limit: float = 7.0
    alpha: float = 1.702

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
        return (up + 1) * gate * jax.nn.sigmoid(self.alpha * gate)


Activation = str | Clamped
"""A key of ACTIVATIONS, for the gate alone, or one of both."""
Factors = tuple[jax.Array, jax.Array] | None
"""a [E, in, R] and b [E, R, out]: x W becomes x W + (x a) b (LoRA, the scale already in b)."""


def unpacked(w, dtype) -> jax.Array:
    """A matrix of every expert, [E, in, out] in `dtype`: an array, or what has `unpack(dtype)`."""
    return w.unpack(dtype) if hasattr(w, "unpack") else w.astype(dtype)


class Adapters(NamedTuple):
    """Low-rank corrections of an expert's three matrices; None: there is none."""

    gate: Factors = None
    up: Factors = None
    down: Factors = None


NO_ADAPTERS = Adapters()


class Biases(NamedTuple):
    """Biases of an expert's three matrices: gate and up [E, F], down [E, D]; None:
    nothing."""

    gate: jax.Array | None = None
    up: jax.Array | None = None
    down: jax.Array | None = None


NO_BIASES = Biases()


def compose(
    matmul,
    x,
    gates,
    w_gate,
    w_up,
    w_down,
    routing,
    *,
    adapters,
    biases,
    activation,
    freeze_experts,
    take=take_rows,
):
    """`moe_ffn` with the routing of its choices, on any grouped matmul.

    The definition, and what backends without a fused kernel run. The hidden state is rounded to
    x's dtype once, after the gate; padding rows have gate 0, so that they add nothing anywhere.
    w_gate None: act(x W_up) is not gated. The bias of down is the caller's: see `add_down_bias`.
    `take`: see `routing.take_rows`; what it leaves undefined, `matmul` neither reads nor returns.
    """
    segments = routing.segments

    def times(x, w):
        return matmul(x, unpacked(w, x.dtype), segments, freeze_w=freeze_experts)

    def project(x, w, factors, bias=None):
        # What was packed is unpacked again by the backward, not kept for it.
        y = (jax.checkpoint(times) if hasattr(w, "unpack") else times)(x, w)
        if factors is not None:
            a, b = factors
            y = y + matmul(matmul(x, a, segments), b, segments)
        return y if bias is None else add_bias(y, bias, segments)

    rows_PD = gather_in(x, routing, take)
    up_PF = project(rows_PD, w_up, adapters.up, biases.up)
    gates_P = gather_gates(gates, routing)
    if w_gate is None:
        hidden_PF = activated(up_PF, gates_P, activation)
    else:
        gate_PF = project(rows_PD, w_gate, adapters.gate, biases.gate)
        hidden_PF = gated(gate_PF, up_PF, gates_P, activation)
    return combine(project(hidden_PF, w_down, adapters.down), routing, take)


# The backward keeps the inputs only, and none of the float32 values in between.
@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=3)
def gated(gate_PF, up_PF, gates, activation: Activation):
    """gates [P] * act(gate) * up, or times what the activation makes of both, computed in at least
    float32; in the dtype of gate."""
    wide = accumulator(gate_PF.dtype)
    gate, up = gate_PF.astype(wide), up_PF.astype(wide)
    if isinstance(activation, str):
        hidden_PF = ACTIVATIONS[activation](gate) * up
    else:
        hidden_PF = activation(gate, up)
    return (gates.astype(wide)[:, None] * hidden_PF).astype(gate_PF.dtype)


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=2)
def activated(up_PF, gates, activation: str):
    """gates [P] * act(up), computed in at least float32; in the dtype of up."""
    wide = accumulator(up_PF.dtype)
    hidden_PF = ACTIVATIONS[activation](up_PF.astype(wide))
    return (gates.astype(wide)[:, None] * hidden_PF).astype(up_PF.dtype)


@jax.custom_vjp
def add_bias(y_PF, bias_EF, segments):
    """Rows y plus the bias of their expert; padding rows, too, which their gate of 0 takes out."""
    blocks = segments.group.shape[0]
    rows_NBF = y_PF.reshape(blocks, -1, y_PF.shape[1])
    return (rows_NBF + bias_EF.astype(y_PF.dtype)[segments.group][:, None]).reshape(y_PF.shape)


def _add_bias_fwd(y_PF, bias_EF, segments):
    return add_bias(y_PF, bias_EF, segments), (bias_EF, segments)


def _add_bias_bwd(residuals, dy_PF):
    bias_EF, segments = residuals
    return dy_PF, bias_gradient(dy_PF, segments).astype(bias_EF.dtype), None


def bias_gradient(dy_PF, segments):
    """[E, F] sums of each expert's rows, at least float32."""
    wide = accumulator(dy_PF.dtype)
    blocks, experts = segments.group.shape[0], segments.starts.shape[0]
    of_blocks = dy_PF.reshape(blocks, -1, dy_PF.shape[1]).astype(wide).sum(1)
    # A product with ones adds up in a fixed order, which a scatter on a GPU does not.
    is_expert = segments.group[None] == jnp.arange(experts, dtype=jnp.int32)[:, None]
    return jnp.matmul(is_expert.astype(wide), of_blocks, precision=jax.lax.Precision.HIGHEST)


add_bias.defvjp(_add_bias_fwd, _add_bias_bwd)


def add_down_bias(y_TD, experts_TK, gates_TK, bias_ED):
    """y plus sum over k of gate_k times the bias of that expert; of one outside [0, E) nothing."""
    wide = accumulator(gates_TK.dtype)
    every = jnp.arange(bias_ED.shape[0], dtype=jnp.int32)
    hit_TKE = experts_TK[..., None] == every
    weight_TE = jnp.where(hit_TKE, gates_TK.astype(wide)[..., None], 0).sum(1)
    added_TD = jnp.matmul(weight_TE, bias_ED.astype(wide), precision=jax.lax.Precision.HIGHEST)
    return (y_TD.astype(wide) + added_TD).astype(y_TD.dtype)
