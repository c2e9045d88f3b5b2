"""The feed-forward layer of every expert on the tokens that chose it: its definition."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain_kernels.grouped_matmul.routing import combine, gather_gates, gather_in
from jaxtrain_kernels.precision import accumulator

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_pytorch_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}

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


def compose(
    matmul, x, gates, w_gate, w_up, w_down, routing, *, adapters, activation, freeze_experts
):
    """`moe_ffn` with the routing of its choices, on any grouped matmul.

    The definition, and what backends without a fused kernel run. The hidden state is rounded to
    x's dtype once, after the gate; padding rows have gate 0, so that they add nothing anywhere.
    w_gate None: act(x W_up) is not gated.
    """
    segments = routing.segments

    def times(x, w):
        return matmul(x, unpacked(w, x.dtype), segments, freeze_w=freeze_experts)

    def project(x, w, factors):
        # What was packed is unpacked again by the backward, not kept for it.
        y = (jax.checkpoint(times) if hasattr(w, "unpack") else times)(x, w)
        if factors is None:
            return y
        a, b = factors
        return y + matmul(matmul(x, a, segments), b, segments)

    rows_PD = gather_in(x, routing)
    up_PF = project(rows_PD, w_up, adapters.up)
    gates_P = gather_gates(gates, routing)
    if w_gate is None:
        hidden_PF = activated(up_PF, gates_P, activation)
    else:
        gate_PF = project(rows_PD, w_gate, adapters.gate)
        hidden_PF = gated(gate_PF, up_PF, gates_P, activation)
    return combine(project(hidden_PF, w_down, adapters.down), routing)


# The backward keeps the inputs only, and none of the float32 values in between.
@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=3)
def gated(gate_PF, up_PF, gates, activation: str):
    """gates [P] * act(gate) * up, computed in at least float32; in the dtype of gate."""
    wide = accumulator(gate_PF.dtype)
    hidden_PF = ACTIVATIONS[activation](gate_PF.astype(wide)) * up_PF.astype(wide)
    return (gates.astype(wide)[:, None] * hidden_PF).astype(gate_PF.dtype)


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=2)
def activated(up_PF, gates, activation: str):
    """gates [P] * act(up), computed in at least float32; in the dtype of up."""
    wide = accumulator(up_PF.dtype)
    hidden_PF = ACTIVATIONS[activation](up_PF.astype(wide))
    return (gates.astype(wide)[:, None] * hidden_PF).astype(up_PF.dtype)
