"""A dropless mixture-of-experts feed-forward layer out of the grouped matmul."""

import jax
import jax.numpy as jnp

from jaxtrain_kernels.grouped_matmul import grouped_matmul
from jaxtrain_kernels.grouped_matmul.routing import BLOCK, combine, gather_in, route


def moe_ffn(
    x: jax.Array,
    experts: jax.Array,
    gates: jax.Array,
    w_in: jax.Array,
    w_out: jax.Array,
    *,
    activation=jax.nn.silu,
    freeze_experts: bool = False,
    block: int = BLOCK,
    impl: str = "auto",
) -> jax.Array:
    """sum over k of gates[t, k] * (activation(x gate_e) * (x up_e)) down_e; [T, D] in x's dtype.

    x [T, D]; experts int32 [T, k] (all of a token's differ or not: both are right); gates [T, k];
    w_in [E, D, 2F] (gate columns, then up columns); w_out [E, F, D]. Every token reaches all its
    experts, so a token's result does not depend on its neighbours. Deterministic.
    Gradients to x, gates and, unless `freeze_experts`, both weights. `block` is the rows that one
    expert's segment is padded to: smaller wastes less, and the Hopper kernels want 128.
    """
    routing = route(experts, w_in.shape[0], block)
    options = {"freeze_w": freeze_experts, "impl": impl}
    rows_PD = gather_in(x, routing)
    gate_PF, up_PF = jnp.split(grouped_matmul(rows_PD, w_in, routing.segments, **options), 2, -1)
    out_PD = grouped_matmul(activation(gate_PF) * up_PF, w_out, routing.segments, **options)
    return combine(out_PD, gates, routing)
