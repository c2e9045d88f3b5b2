"""Router: which experts a token goes to, and how much each of them counts.

Shapes: [..., D] tokens, E experts, k experts per token. All scores are computed in at least
float32: a rounding error here sends a token to another expert.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.layers.linear import Dtype


class Choice(NamedTuple):
    """Where tokens go."""

    experts: jax.Array
    """int32 [..., k], all different."""
    gates: jax.Array
    """[..., k] weight of each; gradients flow through these, never through the choice."""
    probs: jax.Array
    """[..., E] summing to 1: what the balance is measured on."""


class Router(nnx.Module):
    """[..., D] -> Choice of `top` out of E experts.

    scoring "softmax": see `choose_softmax`; "sigmoid": see `choose_sigmoid`, with a `bias` [E] that
    only moves the choice, so it has no gradient. wide: x and the kernel are multiplied in at least
    float32, where other routers round the kernel to `dtype`.
    """

    token_share = 1.0
    """As of a Linear."""

    def __init__(
        self,
        num_features: int,
        num_experts: int,
        *,
        top: int,
        scoring: str = "softmax",
        normalise: bool = False,
        groups: int = 1,
        top_groups: int = 1,
        scale: float = 1.0,
        wide: bool = False,
        init_std: float = 0.02,
        param_dtype: Dtype = jnp.float32,
        dtype: Dtype = jnp.float32,
        rngs: nnx.Rngs,
    ):
        assert scoring in ("softmax", "sigmoid"), scoring
        shape = (num_features, num_experts)
        kernel_DE = init_std * jax.random.normal(rngs.params(), shape, param_dtype)
        self.kernel = nnx.Param(kernel_DE, axes=("embed", None))
        sigmoid = scoring == "sigmoid"
        zeros_E = jnp.zeros((num_experts,), jnp.promote_types(param_dtype, jnp.float32))
        self.bias = nnx.Param(zeros_E, axes=("norm",)) if sigmoid else None
        self.top, self.normalise, self.scale = top, normalise, scale
        self.groups, self.top_groups = groups, top_groups
        self.wide = wide
        self.dtype = jnp.dtype(dtype)

    def __call__(self, x: jax.Array) -> Choice:
        wide = jnp.promote_types(x.dtype, jnp.float32)
        kernel_DE = self.kernel[...].astype(wide if self.wide else self.dtype)
        x = x.astype(wide) if self.wide else x
        logits = jnp.einsum("...D,DE->...E", x, kernel_DE, preferred_element_type=wide)
        if self.bias is None:
            return choose_softmax(logits, self.top, normalise=self.normalise, scale=self.scale)
        return choose_sigmoid(
            logits,
            self.bias[...],
            self.top,
            groups=self.groups,
            top_groups=self.top_groups,
            normalise=self.normalise,
            scale=self.scale,
        )


def choose_softmax(
    logits: jax.Array, top: int, *, normalise: bool = False, scale: float = 1.0
) -> Choice:
    """The `top` most probable of softmax(logits [..., E]), with those probabilities as gates.

    normalise: the gates of a token sum to 1 (Qwen3-MoE's norm_topk_prob), which equals a softmax
    over the chosen logits alone (Mixtral, arXiv:2401.04088).
    """
    probs = jax.nn.softmax(logits, axis=-1)
    gates, experts = jax.lax.top_k(probs, top)
    if normalise:
        gates = gates / gates.sum(-1, keepdims=True)
    return Choice(experts, gates * scale, probs)


def choose_sigmoid(
    logits: jax.Array,
    bias: jax.Array,
    top: int,
    *,
    groups: int = 1,
    top_groups: int = 1,
    normalise: bool = True,
    scale: float = 1.0,
) -> Choice:
    """DeepSeek-V3's choice (arXiv:2412.19437, section 2.1.2), from sigmoid(logits [..., E]).

    bias [E] is added for the choice only (balance without a loss). With `groups`, only experts of
    the `top_groups` groups whose two best experts have the largest sum are candidates. The gates
    are the scores without the bias, summing to 1 if `normalise`, times `scale`.
    """
    scores = jax.nn.sigmoid(logits)
    wanted = jax.lax.stop_gradient(scores) + bias.astype(scores.dtype)
    if groups > 1:
        grouped = wanted.reshape(*wanted.shape[:-1], groups, -1)
        strength = jax.lax.top_k(grouped, 2)[0].sum(-1)
        chosen = jax.lax.top_k(strength, top_groups)[1]
        open_groups = (chosen[..., None] == jnp.arange(groups, dtype=jnp.int32)).any(-2)
        wanted = jnp.where(open_groups[..., None], grouped, -jnp.inf).reshape(wanted.shape)
    experts = jax.lax.top_k(wanted, top)[1]
    gates = jnp.take_along_axis(scores, experts, axis=-1)
    if normalise:
        gates = gates / (gates.sum(-1, keepdims=True) + 1e-20)
    return Choice(experts, gates * scale, scores / scores.sum(-1, keepdims=True))
