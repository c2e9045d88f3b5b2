"""From each token's experts to blocks of rows that share one expert, and back.

Each expert's rows are padded to whole blocks, so a block never straddles two experts: kernels need
no masks, and the number of blocks is known ahead (at most one per expert is partly empty). Gather
in and combine are both gathers in both directions: deterministic, no scatter-add.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain_kernels.precision import accumulator

BLOCK = 128  # rows; what the Hopper kernels want


class Segments(NamedTuple):
    """Where each expert's rows are, in rows of whole blocks."""

    group: jax.Array
    """int32 [blocks] the expert of each block; of unused blocks, any."""
    active: jax.Array
    """int32 [1] number of blocks in use; they come first."""
    starts: jax.Array
    """int32 [E] first row of each expert, a multiple of the block."""
    ends: jax.Array
    """int32 [E] behind its last block."""


class Routing(NamedTuple):
    """How tokens go to rows and come back."""

    segments: Segments
    row_token: jax.Array
    """int32 [P] token of each row; T where the row is padding."""
    slot: jax.Array
    """int32 [T, k] row of each token's k-th expert."""


def route(experts: jax.Array, num_experts: int, block: int = BLOCK) -> Routing:
    """Rows for the chosen experts int32 [T, k] (values in [0, num_experts))."""
    T, k = experts.shape
    flat = experts.reshape(T * k)
    counts = jnp.zeros((num_experts,), jnp.int32).at[flat].add(1)
    blocks_of = (counts + (block - 1)) // block
    block_ends = jnp.cumsum(blocks_of, dtype=jnp.int32)
    starts = (block_ends - blocks_of) * block
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    before = jnp.cumsum(counts, dtype=jnp.int32) - counts
    chosen = flat[order]
    rank = jnp.arange(T * k, dtype=jnp.int32) - before[chosen]
    slot = jnp.zeros_like(flat).at[order].set(starts[chosen] + rank, unique_indices=True)
    num_blocks = -(-T * k // block) + num_experts
    token = jnp.arange(T * k, dtype=jnp.int32) // k
    row_token = jnp.full((num_blocks * block,), T, jnp.int32)
    row_token = row_token.at[slot].set(token, unique_indices=True)
    index = jnp.arange(num_blocks, dtype=jnp.int32)
    group = jnp.searchsorted(block_ends, index, side="right").astype(jnp.int32)
    segments = Segments(
        jnp.minimum(group, num_experts - 1),
        block_ends[-1:],
        starts,
        block_ends * block,
    )
    return Routing(segments, row_token, slot.reshape(T, k))


@jax.custom_vjp
def gather_in(x: jax.Array, routing: Routing) -> jax.Array:
    """[P, D] rows of tokens x [T, D]; padding rows are 0."""
    return jnp.take(x, routing.row_token, axis=0, mode="fill", fill_value=0)


def _gather_in_fwd(x, routing):
    return gather_in(x, routing), routing


def _gather_in_bwd(routing, g):
    total = g[routing.slot].astype(accumulator(g.dtype)).sum(1)
    return total.astype(g.dtype), None


gather_in.defvjp(_gather_in_fwd, _gather_in_bwd)


@jax.custom_vjp
def combine(rows: jax.Array, gates: jax.Array, routing: Routing) -> jax.Array:
    """sum over k of gates[t, k] * rows[slot[t, k]]; [T, D] in the dtype of rows [P, D]."""
    picked_TKD = rows[routing.slot].astype(accumulator(rows.dtype))
    weighted = picked_TKD * gates[:, :, None].astype(picked_TKD.dtype)
    return weighted.sum(1).astype(rows.dtype)


def _combine_fwd(rows, gates, routing):
    return combine(rows, gates, routing), (rows, gates, routing)


def _combine_bwd(residuals, g):
    rows, gates, routing = residuals
    compute = accumulator(rows.dtype)
    T, k = gates.shape
    picked_TKD = rows[routing.slot].astype(compute)
    d_gates = (picked_TKD * g.astype(compute)[:, None]).sum(-1).astype(gates.dtype)
    gate_of_row = jnp.zeros(routing.row_token.shape, compute)
    gate_of_row = gate_of_row.at[routing.slot.reshape(T * k)].set(
        gates.astype(compute).reshape(T * k), unique_indices=True
    )
    g_of_row = jnp.take(g, routing.row_token, axis=0, mode="fill", fill_value=0)
    d_rows = (g_of_row.astype(compute) * gate_of_row[:, None]).astype(rows.dtype)
    return d_rows, d_gates, None


combine.defvjp(_combine_fwd, _combine_bwd)
