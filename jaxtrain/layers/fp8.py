"""Matrix products in FP8, used by Linears if the config key model.matmul selects them.

Micikevicius et al. 2022, arXiv:2209.05433: activations and weights in e4m3, gradients in e5m2 (or
e4m3), each scaled by its largest magnitude of this very call ("current" scaling). Sums are in
float32 inside the product, and what comes out is in the Linear's own dtype. Weights, their
gradients, the optimizer and everything between the products stay as they were.

Scales are powers of two: they cost a number in FP8 no precision, and multiplying by them is exact
in bfloat16, so a scale may stand before or behind a product.
"""

import dataclasses
import functools
from typing import Literal, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.errors import UserError
from jaxtrain.layers.linear import ExpertLinear, Linear, PreciseLinear

FORWARD = "float8_e4m3fn"
GRADIENTS = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}
Model = TypeVar("Model", bound=nnx.Module)
MULTIPLE = 16  # cuBLAS wants dims that are multiples of it


@dataclasses.dataclass(frozen=True)
class Fp8Product:
    """x[..., K] @ w[K, N] in FP8.

    scale "tensor": one scale for an operand. "row": one for each slice along the dim that is summed
    over, so that a token's values do not depend on what else is in the batch; operands are rounded
    anew for each of the three products, as each sums over another dim.
    """

    scale: Literal["tensor", "row"] = "tensor"
    gradients: Literal["e4m3", "e5m2"] = "e5m2"

    def __call__(self, x: jax.Array, w: jax.Array) -> jax.Array:
        rows = x.reshape(-1, x.shape[-1])
        return _product(self, rows, w).reshape(*x.shape[:-1], w.shape[-1])


def use_fp8(model: Model, product: Fp8Product) -> Model:
    """Make the Linears of the abstract `model` for which `takes_fp8` is true multiply by `product`,
    in place; UserError where there is none."""
    linears = [node for path, node in nnx.iter_graph(model) if takes_fp8(path, node)]
    for node in linears:
        node.product = product
    if not linears:
        raise UserError(
            f"model.matmul: of this model no matrix of its layers has widths that are multiples of"
            f" {MULTIPLE}; remove the key"
        )
    return model


def takes_fp8(path: tuple, node: object) -> bool:
    """Return True for a Linear of a layer, but not for routers, experts and heads that score, if
    its widths suit the hardware."""
    if not isinstance(node, Linear) or isinstance(node, PreciseLinear | ExpertLinear):
        return False
    shape = node.kernel.get_value().shape if isinstance(node.kernel, nnx.Param) else (1, 1)
    return path[:1] == ("stack",) and all(size % MULTIPLE == 0 for size in shape[-2:])


def quantize(x: jax.Array, dtype: str, axis: int | None = None) -> tuple[jax.Array, jax.Array]:
    """(values in FP8, scale) with values * scale = x to the nearest; scale has 1 along `axis`, and
    everywhere without one.

    The scale is the smallest power of two that leaves no value above the type's largest. NaN stays
    NaN, and infinity becomes it.
    """
    most = float(jnp.finfo(dtype).max)
    axes = tuple(range(x.ndim)) if axis is None else axis
    largest = jnp.max(jnp.abs(x.astype(jnp.float32)), axis=axes, keepdims=True)
    half, exponent = jnp.frexp(largest / most)  # largest / most = half * 2 ** exponent
    exponent = jnp.where(half == 0.5, exponent - 1, exponent)
    # In the range of normal float32, so that neither the scale nor its inverse is 0 or infinite.
    bits = (jnp.clip(exponent, -100, 100).astype(jnp.int32) + 127) << 23  # exp2 is not exact
    scale = jax.lax.bitcast_convert_type(bits, jnp.float32)
    values = (x.astype(jnp.float32) / scale).astype(dtype)
    # Else XLA fuses the quantization into each consumer, which then reads wide numbers and repeats
    # it.
    return jax.lax.optimization_barrier((values, scale))


def dot(a: jax.Array, b: jax.Array, over: tuple[int, int], dtype: jnp.dtype) -> jax.Array:
    """The product of two matrices in FP8, summed in float32 over dim over[0] of a and over[1] of b,
    in `dtype`."""
    dims = (((over[0],), (over[1],)), ((), ()))

    def fast(a, b):
        # What XLA recognizes, and makes one call of cuBLAS in FP8; written without the conversion,
        # a product of two e4m3 takes half as long again (H200).
        wide = (a.astype(jnp.bfloat16), b.astype(jnp.bfloat16))
        return jax.lax.dot_general(*wide, dims, preferred_element_type=dtype)

    def plain(a, b):
        wide = jax.lax.dot_general(
            a.astype(jnp.float32),
            b.astype(jnp.float32),
            dims,
            precision="highest",
            preferred_element_type=jnp.float32,
        )
        return wide.astype(dtype)

    return jax.lax.platform_dependent(a, b, cuda=fast, default=plain)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(config: Fp8Product, x: jax.Array, w: jax.Array) -> jax.Array:
    return _forward(config, x, w)[0]


def _forward(config, x, w):
    by_row = config.scale == "row"
    x8, x_scale = quantize(x, FORWARD, 1 if by_row else None)
    w8, w_scale = quantize(w, FORWARD, 0 if by_row else None)
    y = dot(x8, w8, (1, 0), x.dtype) * x_scale.astype(x.dtype) * w_scale.astype(x.dtype)
    # The weights are there anyway; x in FP8 is half of x, where it serves for the gradient, too.
    return y, (x if by_row else (x8, x_scale), w)


def _backward(config, saved, dy):
    by_row = config.scale == "row"
    x, w = saved
    narrow = GRADIENTS[config.gradients]
    g8, g_scale = quantize(dy, narrow, 1 if by_row else None)
    w8, w_scale = quantize(w, FORWARD, 1 if by_row else None)
    dx = dot(g8, w8, (1, 1), dy.dtype) * g_scale.astype(dy.dtype)
    dx = dx * w_scale.reshape(1, -1).astype(dy.dtype)
    if by_row:
        g8, g_scale = quantize(dy, narrow, 0)
        x8, x_scale = quantize(x, FORWARD, 0)
    else:
        x8, x_scale = x
    dw = dot(x8, g8, (0, 0), w.dtype) * x_scale.reshape(-1, 1).astype(w.dtype)
    return dx, dw * g_scale.astype(w.dtype)


_product.defvjp(_forward, _backward)
