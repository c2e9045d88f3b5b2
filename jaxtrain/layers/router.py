"""Router: the experts of each token, and their weights.

Every family's router is `choose` with a `RoutingOptions` of its own:

    logits -> cap -> scores -> + bias, groups -> the best k -> their scores -> normalize -> scale

Shapes: [..., D] tokens, E experts, k experts per token, G groups of E / G experts. All scores are
computed in at least float32: a rounding error here sends a token to another expert.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.distributed.sharding import partition_spec
from jaxtrain.layers.linear import Dtype, LayerInit
from jaxtrain.layers.norm import RMSNorm

SCORES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "softmax": lambda logits: jax.nn.softmax(logits, axis=-1),
    "sigmoid": jax.nn.sigmoid,
    "sqrt_softplus": lambda logits: jnp.sqrt(jax.nn.softplus(logits)),
}


class ExpertChoice(NamedTuple):
    """Experts of tokens."""

    experts: jax.Array
    """int32 [..., k], all different."""
    gates: jax.Array
    """[..., k] weight of each; gradients flow through these, never through the choice."""
    probs: jax.Array
    """[..., E] summing to 1: what the balance is measured on."""
    lse: jax.Array
    """[...] logsumexp of the logits, at least float32."""
    routed: jax.Array
    """int32 [..., k]: the router's own choice, which differs from `experts` where these are
    replayed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoutingOptions:
    """Options of `choose`.

    "softmax" that is normalized is a softmax over the chosen logits alone (Mixtral, gpt-oss,
    Granite); a sigmoid with a bias on the choice is DeepSeek-V3's router (arXiv:2412.19437).
    """

    top: int
    """k."""
    score: str = "softmax"
    """A key of SCORES."""
    groups: int = 1
    top_groups: int = 1
    """Only experts of this many groups, those of the greatest strength, are candidates."""
    strength: int = 2
    """Number of a group's best candidates whose scores are summed."""
    normalize: bool = False
    """The gates of a token are divided by their sum."""
    min_sum: float = 0.0
    """A smaller sum than this counts as this (ERNIE)."""
    eps: float = 1e-20
    """Added to the sum."""
    scale: float = 1.0
    """Factor on the gates, applied last."""
    near: float | None = None
    """The gate of each expert is a softmax over those not chosen before it whose logits are within
    this relative distance of the best (SparseMixer: Liu et al. 2024, arXiv:2409.12136, as in
    evaluation); None: gates are scores."""
    logit_cap: float | None = None
    """cap * tanh(logits / cap) takes their place."""

    def __post_init__(self):
        assert self.score in SCORES, self.score


def choose(
    logits: jax.Array,
    routing: RoutingOptions,
    *,
    choice_bias: jax.Array | None = None,
    expert_scale: jax.Array | None = None,
    replayed: jax.Array | None = None,
) -> ExpertChoice:
    """Choose experts by logits [..., E].

    choice_bias [E] is added to scores for the choice only, so gates never hold it and it has no
    gradient. Candidates of closed groups are at -inf, which a biased score may lie far below 0.
    expert_scale [E]: what the gate of each expert is multiplied with. replayed: int32 [..., k],
    experts chosen elsewhere, whose gates are computed here; a token with a negative one, or one
    twice, goes where it would.
    """
    if routing.logit_cap is not None:
        logits = routing.logit_cap * jnp.tanh(logits / routing.logit_cap)
    # In the logits' dtype, at least float32: a rounding error could send a token to another expert.
    scores = SCORES[routing.score](logits)
    # Gradients flow through the gates only; top_k has none to its indices.
    priority = jax.lax.stop_gradient(scores)
    if choice_bias is not None:
        priority = priority + jax.lax.stop_gradient(choice_bias).astype(scores.dtype)
    if routing.top_groups < routing.groups:
        priority = _close_groups(priority, routing)
    experts = routed = _best(priority, routing.top)
    if replayed is not None:
        experts = jnp.where(_are_experts(replayed), replayed.astype(experts.dtype), experts)
    # From the unbiased scores: the choice bias balances load and must not scale outputs.
    gates = jnp.take_along_axis(scores, experts, axis=-1)
    if routing.near is not None:
        gates = _near_gates(logits, experts, routing.near)
    if routing.normalize:
        total = gates.sum(-1, keepdims=True)
        if routing.min_sum:
            total = jnp.maximum(total, routing.min_sum)
        # A sum of sigmoids can underflow to 0.
        gates = gates / (total + routing.eps)
    if routing.scale != 1:
        gates = gates * routing.scale
    if expert_scale is not None:
        gates = gates * expert_scale.astype(gates.dtype)[experts]
    probs = scores if routing.score == "softmax" else scores / scores.sum(-1, keepdims=True)
    return ExpertChoice(experts, gates, probs, jax.nn.logsumexp(logits, axis=-1), routed)


def _near_gates(logits: jax.Array, experts: jax.Array, near: float) -> jax.Array:
    """Return the gates [..., k] of `RoutingOptions.near`."""
    gates, remaining = [], logits
    for expert in jnp.split(experts, experts.shape[-1], axis=-1):
        best = jax.lax.stop_gradient(remaining.max(-1, keepdims=True))
        distance = (best - logits) / jnp.maximum(jnp.abs(logits), best)
        scores = jax.nn.softmax(jnp.where(distance > near, -jnp.inf, remaining), axis=-1)
        gates.append(jnp.take_along_axis(scores, expert, axis=-1))
        chosen = expert == jnp.arange(logits.shape[-1], dtype=expert.dtype)
        remaining = jnp.where(chosen, -jnp.inf, remaining)
    return jnp.concatenate(gates, axis=-1)


def _are_experts(ids: jax.Array) -> jax.Array:
    """bool [..., 1]: whether each token has k experts there, none of them twice."""
    ascending = jnp.sort(ids, axis=-1)
    # Replayed choices of another precision or engine may be incomplete: those tokens are routed
    # here.
    differ = (ascending[..., 1:] != ascending[..., :-1]).all(-1, keepdims=True)
    return differ & (ascending[..., :1] >= 0)


def _best(priority: jax.Array, top: int) -> jax.Array:
    """Return int32 [..., top]: the experts of the greatest `priority` [..., E], every device for
    its own tokens. Left alone, the partitioner gathers the scores of all."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1 or priority.ndim != 3:
        return jax.lax.top_k(priority, top)[1]
    spec = partition_spec(("rows", "length", None), priority.shape, mesh)
    best = lambda priority: jax.lax.top_k(priority, top)[1]  # noqa: E731
    return jax.shard_map(best, in_specs=spec, out_specs=spec, check_vma=False)(priority)


def _close_groups(priority: jax.Array, routing: RoutingOptions) -> jax.Array:
    """`priority` [..., E] with -inf in all but the strongest groups."""
    grouped = priority.reshape(*priority.shape[:-1], routing.groups, -1)
    strength = jax.lax.top_k(grouped, min(routing.strength, grouped.shape[-1]))[0].sum(-1)
    chosen = _best(strength, routing.top_groups)
    is_open = (chosen[..., None] == jnp.arange(routing.groups, dtype=jnp.int32)).any(-2)
    return jnp.where(is_open[..., None], grouped, -jnp.inf).reshape(priority.shape)


class Router(nnx.Module):
    """[..., D] -> Choice among E experts: `choose` of x @ kernel [D, E].

    logit_bias: a trained `bias` [E] on the logits. choice_bias: a `choice_bias` [E] on the scores,
    for the choice alone; in at least float32, as it moves by steps that a bfloat16 would swallow.
    expert_scale: a trained factor [E] on the gates. norm: what x goes through first, multiplied
    with input_scale. wide: x and the kernel are multiplied in at least float32 at the highest
    precision, where other routers round the kernel to `dtype`; sums are float32 in either. The slot
    `adapter` is that of a Linear.
    """

    token_share = 1.0
    """See `Linear.token_share`."""

    def __init__(
        self,
        num_features: int,
        num_experts: int,
        routing: RoutingOptions,
        *,
        logit_bias: bool = False,
        choice_bias: bool = False,
        expert_scale: bool = False,
        norm: RMSNorm | None = None,
        input_scale: float = 1.0,
        wide: bool = False,
        init: LayerInit,
    ):
        shape, floats = (
            (num_features, num_experts),
            jnp.promote_types(init.param_dtype, jnp.float32),
        )
        kernel_DE = init.normal(shape)
        self.kernel = nnx.Param(kernel_DE, axes=("embed", None))

        def vector(enabled: bool, value: float, dtype: Dtype) -> nnx.Param | None:
            full_E = jnp.full((num_experts,), value, dtype)
            return nnx.Param(full_E, axes=("norm",)) if enabled else None

        self.bias = vector(logit_bias, 0, init.param_dtype)
        self.choice_bias = vector(choice_bias, 0, floats)
        self.expert_scale = vector(expert_scale, 1, init.param_dtype)
        # As Linear's: a module may take its place.
        self.adapter: Any = nnx.data(None)
        self.norm, self.input_scale = norm, input_scale
        self.routing, self.wide = routing, wide
        self.dtype = jnp.dtype(init.dtype)

    def __call__(self, x: jax.Array, replayed: jax.Array | None = None) -> ExpertChoice:
        """replayed: see `choose`."""
        if self.norm is not None:
            x = self.norm(x)
        if self.input_scale != 1:
            x = x * jnp.asarray(self.input_scale, x.dtype)
        floats = jnp.promote_types(x.dtype, jnp.float32)
        kernel_DE = self.kernel[...].astype(floats if self.wide else self.dtype)
        logits = jnp.einsum(
            "...D,DE->...E",
            x.astype(floats) if self.wide else x,
            kernel_DE,
            preferred_element_type=floats,
            # XLA for GPUs would cut float32 factors to 10 bits.
            precision=jax.lax.Precision.HIGHEST if self.wide else None,
        )
        if self.adapter is not None:
            logits = self.adapter(x.astype(floats), logits, None)
        if self.bias is not None:
            logits = logits + self.bias[...].astype(floats)
        return choose(
            logits,
            self.routing,
            choice_bias=None if self.choice_bias is None else self.choice_bias[...],
            expert_scale=None if self.expert_scale is None else self.expert_scale[...],
            replayed=replayed,
        )
