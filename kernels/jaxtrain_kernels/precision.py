"""The dtype that sums and softmaxes are computed in."""

import jax.numpy as jnp


def accumulator(dtype) -> jnp.dtype:
    """float64 for float64, else float32 (`promote_types` refuses bfloat16 in strict mode)."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)
