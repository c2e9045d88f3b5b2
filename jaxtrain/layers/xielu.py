"""xIELU (Huang and Schlag 2024, arXiv:2411.13010), an activation that is trained, and its MLP."""

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.layers.linear import LayerInit
from jaxtrain.layers.mlp import MLP

BETA, EPS = 0.5, -1e-6
START = 0.8
"""Both slopes of a new model."""


class XIELU(nnx.Module):
    """[..., F] -> [..., F], x at a time: a_p x^2 + beta x above 0, a_n (e^min(x, eps) - 1 - x) +
    beta x below, where a_p = softplus(alpha_p) and a_n = beta + softplus(alpha_n).

    alpha_p, alpha_n: [1]. beta, eps: numbers that are loaded and saved, and have no gradient.
    """

    def __init__(self, *, init: LayerInit):
        def vector(value: float, shape: tuple[int, ...]) -> nnx.Param:
            return nnx.Param(jnp.full(shape, value, init.param_dtype), axes=("norm",) * len(shape))

        self.alpha_p = vector(math.log(math.expm1(START)), (1,))
        self.alpha_n = vector(math.log(math.expm1(START - BETA)), (1,))
        self.beta, self.eps = vector(BETA, ()), vector(EPS, ())

    def __call__(self, x: jax.Array) -> jax.Array:
        fixed = (jax.lax.stop_gradient(number[...]) for number in (self.beta, self.eps))
        return activated(x, self.alpha_p[...], self.alpha_n[...], *fixed)


class XIELUMLP(MLP):
    """[..., D] -> [..., D] through F, with an `XIELU` as activation."""

    def __init__(self, num_features: int, num_hidden: int, *, init: LayerInit):
        super().__init__(num_features, num_hidden, init=init)
        self.act = XIELU(init=init)

    def _hidden(self, x_BTD: jax.Array) -> jax.Array:
        return self.act(self.up(x_BTD))


@functools.partial(jax.checkpoint, prevent_cse=False)
def activated(
    x: jax.Array, alpha_p: jax.Array, alpha_n: jax.Array, beta: jax.Array, eps: jax.Array
) -> jax.Array:
    """The formula of XIELU, on arrays; in at least float32, rounded to x's dtype at the end."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    y, alpha_p, alpha_n, beta, eps = (a.astype(wide) for a in (x, alpha_p, alpha_n, beta, eps))
    above = jax.nn.softplus(alpha_p) * y * y
    below = (beta + jax.nn.softplus(alpha_n)) * (jnp.expm1(jnp.minimum(y, eps)) - y)
    return (jnp.where(y > 0, above, below) + beta * y).astype(x.dtype)
