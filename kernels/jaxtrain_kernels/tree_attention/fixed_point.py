"""Sums that come out the same in whatever order they are added: dQ of the fused backward in int32.

Each block of keys adds its part of dQ, and which one comes first changes from run to run. Rounded
sums in float32 then differ in their last bits; integers do not. So a query's dQ is summed in
multiples of a unit, which is as fine as int32 allows: a bound on |dQ| must come to less than 2^31
units. (An overflow on the way would not matter, for the sum is exact modulo 2^32.)

The bound of query i and column c: |dQ_ic| <= sum_j |dS_ij| |K_jc|, where dS_ij = P_ij (dP_ij -
delta_i), sum_j P_ij <= 1 and |dP_ij| <= |dO_i| max_j |V_j|. Columns of keys may have very different
sizes, which one unit a query would not suit. Therefore dQ is made of keys that are divided by a
power of two for each column, which is exact: then each column lies within (-2, 2).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

UNITS = 2.0**30  # of a bound: half of what int32 holds, for P and dS are rounded
SMALLEST = 2.0**-90  # of bounds: a query without gradient gets 0, not 0/0


class Scales(NamedTuple):
    """Units in which dQ is summed."""

    columns: jax.Array
    """Of keys: powers of two, float32 [B, K, H]."""
    units: jax.Array
    """float32 [B, N, T]: units of each query in 1."""


def find_columns(k: jax.Array) -> jax.Array:
    """`Scales.columns` of k [B, S, K, H]: at or below each one's largest magnitude; 1 for zeros."""
    largest = jnp.max(jnp.abs(k), axis=1).astype(jnp.float32)
    # The exponent bits alone are the power of two at or below the number.
    exponent = lax.bitcast_convert_type(largest, jnp.int32) & jnp.int32(0x7F800000)
    power = lax.bitcast_convert_type(exponent, jnp.float32)
    return jnp.where(power > 0, power, 1.0)


def find_units(d_out: jax.Array, delta: jax.Array, v: jax.Array) -> jax.Array:
    """`Scales.units` for d_out [B, T, N, H], delta [B, N, T] and v [B, S, K, H].

    A query that sees something that is not finite has such a delta; its unit is 0 or NaN then, and
    its dQ NaN whatever its sum is.
    """
    f32 = jnp.float32
    length = jnp.sqrt(jnp.square(d_out.astype(f32)).sum(-1)).swapaxes(1, 2)
    longest = jnp.sqrt(jnp.square(v.astype(f32)).sum(-1).max(1))
    longest = jnp.repeat(longest, length.shape[1] // v.shape[2], axis=1)[:, :, None]
    bound = 2.0 * (length * longest + jnp.abs(delta))
    return UNITS / jnp.maximum(bound, SMALLEST)


def value_of(total: jax.Array, scales: Scales, scale: float, dtype) -> jax.Array:
    """dQ [B, T, N, H] in `dtype` of sums in units."""
    units = scales.units.swapaxes(1, 2)[..., None]
    shared = total.shape[2] // scales.columns.shape[1]
    columns = jnp.repeat(scales.columns, shared, axis=1)[:, None]
    return (total.astype(jnp.float32) * (scale / units) * columns).astype(dtype)
