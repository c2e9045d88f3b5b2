"""grouped_matmul in plain XLA: a scan over blocks of rows, each with its expert's matrix.

Exact anywhere and small in memory; one modest matmul at a time, so slow on large devices. (jax's
own `lax.ragged_dot` lowers to every row times every expert on a GPU.)
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain_kernels.grouped_matmul.ffn import compose
from jaxtrain_kernels.precision import accumulator


def grouped_matmul(x, w, segments, *, freeze_w=False):
    """Implement `jaxtrain_kernels.grouped_matmul`."""
    return _grouped(freeze_w, x, w, segments)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped(freeze_w, x, w, segments):
    return _product(x, w, segments, "BD,DF->BF")


def _product(x, w, segments, spec):
    """Every block of x times its expert's matrix, in the order of `spec`; 0 in unused blocks."""
    blocks = segments.group.shape[0]
    x_NBD = x.reshape(blocks, -1, x.shape[1])
    used = jnp.arange(blocks, dtype=jnp.int32) < segments.active

    def body(block):
        x_BD, group, used = block
        w_DF = lax.dynamic_index_in_dim(w, group, 0, keepdims=False).astype(x.dtype)
        y = jnp.einsum(spec, x_BD, w_DF, preferred_element_type=accumulator(x.dtype))
        return jnp.where(used, y, 0.0).astype(x.dtype)

    y = lax.map(body, (x_NBD, segments.group, used))
    return y.reshape(x.shape[0], -1)


def _grouped_fwd(freeze_w, x, w, segments):
    return _grouped(freeze_w, x, w, segments), (x, w, segments)


def _grouped_bwd(freeze_w, residuals, dy):
    x, w, segments = residuals
    dx = _product(dy, w, segments, "BF,DF->BD")
    if freeze_w:
        return dx, None, None
    blocks = segments.group.shape[0]
    used = jnp.arange(blocks, dtype=jnp.int32) < segments.active

    def body(dw, block):
        x_BD, dy_BF, group, used = block
        piece = jnp.einsum("BD,BF->DF", x_BD, dy_BF, preferred_element_type=dw.dtype)
        piece = jnp.where(used, piece, 0.0)
        old = lax.dynamic_index_in_dim(dw, group, 0, keepdims=False)
        return lax.dynamic_update_index_in_dim(dw, old + piece, group, 0), None

    xs = (x.reshape(blocks, -1, x.shape[1]), dy.reshape(blocks, -1, dy.shape[1]))
    dw, _ = lax.scan(body, jnp.zeros(w.shape, accumulator(x.dtype)), (*xs, segments.group, used))
    return dx, dw.astype(w.dtype), None


_grouped.defvjp(_grouped_fwd, _grouped_bwd)


def moe_ffn(x, gates, w_gate, w_up, w_down, routing, **options):
    """Implement `jaxtrain_kernels.moe_ffn`, with the routing of its choices."""
    return compose(grouped_matmul, x, gates, w_gate, w_up, w_down, routing, **options)
