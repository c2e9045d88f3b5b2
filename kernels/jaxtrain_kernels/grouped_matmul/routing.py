"""From each token's experts to blocks of rows that share one expert, and back.

Each expert's rows are padded to whole blocks, so a block never straddles two experts: kernels need
no masks, and the number of blocks is known ahead (at most one per expert is partly empty). Gather
in and combine are both gathers in both directions: deterministic, no scatter-add.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain_kernels.precision import accumulator

BLOCK = 128  # rows; what the Hopper kernels want


class Segments(NamedTuple):
    """Layout of the experts' rows, in whole blocks."""

    group: jax.Array
    """int32 [blocks] the expert of each block; of unused blocks, any."""
    active: jax.Array
    """int32 [1] number of blocks in use; they come first."""
    starts: jax.Array
    """int32 [E] first row of each expert, a multiple of the block."""
    ends: jax.Array
    """int32 [E] behind its last block."""


class Routing(NamedTuple):
    """Mapping from tokens to rows and back."""

    segments: Segments
    row_token: jax.Array
    """int32 [P] token of each row; T where the row is padding."""
    slot: jax.Array
    """int32 [T, k] row of each token's k-th expert; P or more where it has none here."""


def route(
    experts: jax.Array, num_experts: int, block: int = BLOCK, capacity: int | None = None
) -> Routing:
    """Rows for the chosen experts int32 [T, k]; one outside [0, num_experts) gets none. At most
    `capacity` choices are inside; None: all may be."""
    T, k = experts.shape
    flat = experts.reshape(T * k)
    flat = jnp.where(
        (flat >= 0) & (flat < num_experts), flat, num_experts
    )  # choices of no local expert sort last
    counts = jnp.zeros((num_experts + 1,), jnp.int32).at[flat].add(1)
    blocks_of = (counts[:-1] + (block - 1)) // block
    block_ends = jnp.cumsum(blocks_of, dtype=jnp.int32)
    starts = (block_ends - blocks_of) * block
    # Stable: an expert's rows are in the order of their tokens, the same in every run.
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    before = jnp.cumsum(counts, dtype=jnp.int32) - counts
    chosen = flat[order]
    rank = jnp.arange(T * k, dtype=jnp.int32) - before[chosen]
    # Static: each expert may leave one block partly empty.
    num_blocks = -(-(capacity or T * k) // block) + num_experts
    rows = num_blocks * block
    first = jnp.append(starts, jnp.int32(rows))[chosen]
    # Distinct by construction; choices without an expert go past the last row and are dropped.
    slot = jnp.zeros_like(flat).at[order].set(first + rank, unique_indices=True)
    token = jnp.arange(T * k, dtype=jnp.int32) // k
    row_token = jnp.full((rows,), T, jnp.int32)
    row_token = row_token.at[slot].set(token, unique_indices=True, mode="drop")
    index = jnp.arange(num_blocks, dtype=jnp.int32)
    group = jnp.searchsorted(block_ends, index, side="right").astype(jnp.int32)
    segments = Segments(
        jnp.minimum(group, num_experts - 1), block_ends[-1:], starts, block_ends * block
    )
    return Routing(segments, row_token, slot.reshape(T, k))


def take_rows(x: jax.Array, index: jax.Array, active: jax.Array) -> jax.Array:
    """x[index] for indices in range; all that matter are in the first `active` blocks."""
    del active
    # Indices are clipped by the caller; a fill mode would read a mask for every row.
    return x.at[index].get(mode="promise_in_bounds")


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def gather_in(x: jax.Array, routing: Routing, take: Callable = take_rows) -> jax.Array:
    """[P, D] rows of tokens x [T, D]; padding rows repeat some token. `take`: see `take_rows`."""
    return _spread(x, routing, take)


def _gather_in_fwd(x, routing, take):
    return gather_in(x, routing, take), routing


def _gather_in_bwd(take, routing, g):
    return _sum_back(g, routing), None


gather_in.defvjp(_gather_in_fwd, _gather_in_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def combine(rows: jax.Array, routing: Routing, take: Callable = take_rows) -> jax.Array:
    """sum over k of rows[slot[t, k]]; [T, D] in the dtype of rows [P, D].

    Its gradient at padding rows is that of some token: whoever made them must not count it.
    """
    return _sum_back(rows, routing)


def _combine_fwd(rows, routing, take):
    return combine(rows, routing, take), routing


def _combine_bwd(take, routing, g):
    return _spread(g, routing, take), None


combine.defvjp(_combine_fwd, _combine_bwd)


def _spread(x, routing, take):
    index = jnp.minimum(routing.row_token, x.shape[0] - 1)
    return take(x, index, routing.segments.active)


@jax.custom_vjp
def gather_gates(gates: jax.Array, routing: Routing) -> jax.Array:
    """[P] the gate [T, k] that each row came with, 0 for padding; at least float32."""
    wide = accumulator(gates.dtype)
    empty = jnp.zeros(routing.row_token.shape, wide)
    flat = gates.astype(wide).reshape(-1)
    return empty.at[routing.slot.reshape(-1)].set(flat, unique_indices=True, mode="drop")


def _gather_gates_fwd(gates, routing):
    return gather_gates(gates, routing), (routing, jnp.zeros((), gates.dtype))


def _gather_gates_bwd(residuals, g):
    routing, gates_type = residuals
    return _pick(g, routing.slot).astype(gates_type.dtype), None


gather_gates.defvjp(_gather_gates_fwd, _gather_gates_bwd)


def _sum_back(rows, routing):
    # A gather and a sum over k, where a scatter-add would need atomics and have no fixed order.
    picked_TKD = _pick(rows, routing.slot).astype(accumulator(rows.dtype))
    return picked_TKD.sum(1).astype(rows.dtype)


def _pick(rows, slot):
    return rows.at[slot].get(mode="fill", fill_value=0)
