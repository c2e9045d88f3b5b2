"""The definition of grouped_matmul: every row times every expert, and a mask."""

import jax.numpy as jnp

from jaxtrain_kernels.grouped_matmul.ffn import compose
from jaxtrain_kernels.precision import accumulator


def grouped_matmul(x, w, segments, *, freeze_w=False):
    """Implement `jaxtrain_kernels.grouped_matmul`. Holds [P, E, F]: for tests and tiny inputs."""
    del freeze_w  # the caller has stopped the gradient already
    row = jnp.arange(x.shape[0], dtype=jnp.int32)[:, None]
    mine_PE = (segments.starts[None] <= row) & (row < segments.ends[None])
    every_PEF = jnp.einsum(
        "PD,EDF->PEF", x, w.astype(x.dtype), preferred_element_type=accumulator(x.dtype)
    )
    return jnp.where(mine_PE[:, :, None], every_PEF, 0.0).sum(1).astype(x.dtype)


def moe_ffn(x, gates, w_gate, w_up, w_down, routing, **options):
    """Implement `jaxtrain_kernels.moe_ffn`, with the routing of its choices."""
    return compose(grouped_matmul, x, gates, w_gate, w_up, w_down, routing, **options)
