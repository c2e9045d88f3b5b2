"""Distillation: the divergence of a student from a teacher, never with all logits of either.

    trained tokens of the row, gathered in chunks of C:
        student's logits [C, V] ─┬─ divergence, likelihood ─> sums
        teacher's logits [C, V] ─┘  and their gradient [C, V] ─> d hidden [C, D], d head += [V, D]

A loop over the chunks that hold a trained token, so work goes by these alone. The weights are known
before the logits are, so gradients are made in the forward pass (as in weighted_logp): logits of
both are computed once, and neither pass holds more than a chunk of them. The teacher gets no
gradient. On a mesh each device does this for its tokens and its slice of the vocabulary, as in
vocabulary.py.

Shapes: B rows, T packed tokens, D the student's features, E the teacher's, V ids, C of a chunk.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtrain_kernels.logp_gather.slices import Axis, local_targets
from jaxtrain_kernels.precision import accumulator

from jaxtrain.batch import Batch
from jaxtrain.core.losses.divergence import ComparedTokens, Rest, add_up, compare_all, compare_topk
from jaxtrain.core.losses.logp import predictions
from jaxtrain.core.losses.topk import MAX_LOGITS, TopK, log_softmax, take_topk
from jaxtrain.core.losses.vocabulary import place_tokens, stored_axes, whole_head
from jaxtrain.layers.embed import capped

COMPONENT = "distillation"
"""The loss's one component, whose weights say which tokens train."""
IDS, LOGP, OWN = "teacher_ids", "teacher_logp", "own"
"""Streams: the teacher's likeliest tokens and their log-probs, each [T, k]; 1 where the student
itself drew the token."""


@dataclass(frozen=True)
class Distillation:
    """The numbers of the loss; divergence.py says what they mean."""

    beta: float = 0.0
    temperature: float = 1.0
    top_k: int | None = None
    """Of a teacher whose whole distribution is there: compare this many of its tokens."""
    rest: Rest = "bucket"
    scale: float = 1.0
    """Factor of the divergence: temperature^2 keeps gradients alike at all temperatures."""
    ce_weight: float = 0.0
    """Factor of the data's own negative log-likelihood beside it."""
    chunk: int | None = None
    """Tokens of a chunk; None: so many that its logits are MAX_LOGITS."""


Softcaps = tuple[float | None, float | None]
"""`logit_softcap` of student and teacher."""


class TokenDivergence(NamedTuple):
    """Numbers of each token, [T]; 0 where it does not train."""

    divergence: Any
    teacher_entropy: Any
    student_entropy: Any
    agree: Any
    nll: Any
    """Of the token that is there, at temperature 1."""


def distillation_loss(model, teacher, batch: Batch, numbers: Distillation):
    """Weighted sum over the trained tokens of rows [B, T]: ({"distillation": sum}, metrics).

    teacher: a model that reads the same tokens, or None: the batch's streams IDS and LOGP say what
    it would. `weights["distillation"]` weigh; where the stream OWN is, what the student drew itself
    is no data, and has no part in ce_weight's term.
    """
    hidden_BTD, target_BT = predictions(model, batch)
    weight_BT = batch.weights[COMPONENT]
    ce_BT = numbers.ce_weight * weight_BT
    own_BT = batch.streams.get(OWN)
    if own_BT is not None:
        ce_BT = jnp.where(own_BT > 0, jnp.zeros_like(ce_BT), ce_BT)
    if teacher is None:
        targets = TopK(batch.streams[IDS], batch.streams[LOGP])
    else:
        states_BTE, _ = predictions(teacher, batch)
        targets = (lax.stop_gradient(states_BTE), lax.stop_gradient(teacher.head()))
    head_VD = model.head()
    if teacher is not None:
        # Vocabularies are padded to different sizes; no token has an id beyond the smaller one.
        size = min(head_VD.shape[0], targets[1].shape[0])
        head_VD, targets = head_VD[:size], (targets[0], targets[1][:size])
    caps = (model.logit_softcap, None if teacher is None else teacher.logit_softcap)
    total, tokens = sum_divergence(
        hidden_BTD, head_VD, targets, target_BT, weight_BT, ce_BT, numbers, caps
    )
    return {COMPONENT: total}, describe(tokens, weight_BT, own_BT, numbers.beta)


def describe(tokens: TokenDivergence, weight_BT, own_BT, beta: float) -> dict[str, Any]:
    """Return weighted means as (sum, weight); with drawn samples, the divergence of both kinds of
    tokens."""
    weight_BT = weight_BT.astype(tokens.nll.dtype)
    name = "kl" if beta in (0.0, 1.0) else "jsd"
    values = {
        name: tokens.divergence,
        "nll": tokens.nll,
        "teacher_entropy": tokens.teacher_entropy,
        "entropy": tokens.student_entropy,
        "agreement": tokens.agree,
    }
    weight = jnp.sum(weight_BT)
    metrics = {key: (jnp.sum(weight_BT * value), weight) for key, value in values.items()}
    if own_BT is not None:
        for kind, here_BT in (("own", own_BT > 0), ("data", own_BT <= 0)):
            part_BT = jnp.where(here_BT, weight_BT, 0.0)
            pair = (jnp.sum(part_BT * tokens.divergence), jnp.sum(part_BT))
            metrics[f"{name}/{kind}"] = pair
    return metrics


def sum_divergence(
    hidden_BTD,
    head_VD,
    teacher,
    target_BT,
    weight_BT,
    ce_BT,
    numbers: Distillation,
    softcaps: Softcaps = (None, None),
) -> tuple[jax.Array, TokenDivergence]:
    """(sum of weight x scale x divergence + ce x nll, numbers of each token [B, T], which carry no
    gradient).

    teacher: (the teacher's states [B, T, E], its head [V, E]) or TopK of [B, T, k]. Gradients flow
    to hidden and head. The arrays may be sharded in any way.
    """
    is_topk = isinstance(teacher, TopK)

    def local(axis, hidden_BTD, head_VD, states, weights, target_BT, weight_BT, ce_BT):
        flat = lambda x: x.reshape(-1, x.shape[-1])  # noqa: E731
        teacher = TopK(flat(states), flat(weights)) if is_topk else (flat(states), weights)
        spec = DivergenceSpec(numbers, axis, softcaps)
        sums: Any = divergence_sum(
            spec,
            flat(hidden_BTD),
            head_VD,
            teacher,
            target_BT.reshape(-1).astype(jnp.int32),
            weight_BT.reshape(-1),
            ce_BT.reshape(-1),
        )
        total, tokens = sums
        return total, TokenDivergence(*(field.reshape(target_BT.shape) for field in tokens))

    states, weights = teacher[0], teacher[1]
    per_token = (target_BT, weight_BT, ce_BT)
    spec_BTD, vocabulary = place_tokens(hidden_BTD, head_VD)
    if spec_BTD is None:
        return local(None, hidden_BTD, head_VD, states, weights, *per_token)
    by_token = PartitionSpec(*spec_BTD[:2])
    shards: list[str] = []
    for axes in by_token:
        shards += [axes] if isinstance(axes, str) else axes or ()
    stored = stored_axes(head_VD)
    teacher_axes = () if is_topk else stored_axes(weights)

    def summed(hidden_BTD, head_VD, states, weights, *per_token):
        head_VD = whole_head(head_VD, hidden_BTD.dtype, stored)
        if not is_topk:
            weights = whole_head(weights, states.dtype, teacher_axes)
        total, tokens = local(vocabulary, hidden_BTD, head_VD, states, weights, *per_token)
        return jax.lax.psum(total, tuple(shards)) if shards else total, tokens

    other_spec = by_token if is_topk else PartitionSpec(vocabulary, teacher_axes or None)
    return jax.shard_map(
        summed,
        in_specs=(
            spec_BTD,
            PartitionSpec(vocabulary, stored or None),
            PartitionSpec(*by_token, None),
            PartitionSpec(*by_token, None) if is_topk else other_spec,
            by_token,
            by_token,
            by_token,
        ),
        out_specs=(PartitionSpec(), by_token),
        check_vma=False,
    )(hidden_BTD, head_VD, states, weights, *per_token)


class DivergenceSpec(NamedTuple):
    """Static arguments of the compiled program, beside shapes."""

    numbers: Distillation
    axis: Axis
    softcaps: Softcaps


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def divergence_sum(spec: DivergenceSpec, hidden_TD, head_VD, teacher, target_T, weight_T, ce_T):
    """(sum, Measured) of flat local tokens."""
    total, tokens, _ = walk(spec, hidden_TD, head_VD, teacher, target_T, weight_T, ce_T, None)
    return total, tokens


def _fwd(spec, hidden, head, teacher, target, weight, ce):
    # Who is perturbed is differentiated: a frozen head's gradient is never made.
    arguments = (hidden, head, *jax.tree.leaves(teacher), target, weight, ce)
    values = [argument.value for argument in arguments]
    rest = jax.tree.unflatten(jax.tree.structure(teacher, is_leaf=_is_primal), values[2:-3])
    needs_grad = (hidden.perturbed, head.perturbed)
    total, tokens, grads = walk(spec, values[0], values[1], rest, *values[-3:], needs_grad)
    return (total, tokens), grads


def _is_primal(leaf) -> bool:
    return hasattr(leaf, "perturbed")


def _bwd(spec: DivergenceSpec, grads, cotangents):
    g, _ = cotangents
    if isinstance(g, jax.custom_derivatives.SymbolicZero):
        return (None,) * 6
    if spec.axis is not None:
        # Every device of the axis returned the same sum and was handed its share of g.
        g = lax.psum(g, spec.axis)
    d_hidden, d_head = (
        None if x is None else (g * x.astype(g.dtype)).astype(x.dtype) for x in grads
    )
    return d_hidden, d_head, None, None, None, None


divergence_sum.defvjp(_fwd, _bwd, symbolic_zeros=True)


def walk(
    spec: DivergenceSpec, hidden_TD, head_VD, teacher, target_T, weight_T, ce_T, needs_grad: Any
):
    """Compute (sum, TokenDivergence, (d hidden, d head)) over the trained tokens, chunk by chunk.

    needs_grad: whether the gradients by hidden and by head are needed; None for neither.
    """
    numbers, _, (softcap, other_softcap) = spec
    T, V = hidden_TD.shape[0], head_VD.shape[0]
    compute = accumulator(hidden_TD.dtype)
    chunk = min(numbers.chunk or max(MAX_LOGITS // V // 128, 1) * 128, T)
    trains_T = (weight_T != 0) | (ce_T != 0)
    weight_T, ce_T = weight_T.astype(compute), ce_T.astype(compute)
    # Trained tokens first; what fills up the last chunk lies beyond the end and is dropped.
    order = jnp.argsort(~trains_T, stable=True).astype(jnp.int32)
    count = jnp.sum(trains_T)
    order = jnp.where(jnp.arange(T) < count, order, T)
    order = jnp.pad(order, (0, -T % chunk), constant_values=T)
    low_VD = head_VD.astype(hidden_TD.dtype)
    d_hidden = d_head = None
    if needs_grad is not None and needs_grad[0]:
        d_hidden = jnp.zeros_like(hidden_TD)
    if needs_grad is not None and needs_grad[1]:
        d_head = jnp.zeros(head_VD.shape, compute)
    zeros_T = jnp.zeros(T, compute)
    start = (jnp.zeros((), compute), TokenDivergence(*[zeros_T] * 5), d_hidden, d_head)

    def pick(x, index_C):
        return x.at[index_C].get(mode="fill", fill_value=0)

    def step(number, carry):
        total, tokens, d_hidden, d_head = carry
        index_C = lax.dynamic_slice(order, (number * chunk,), (chunk,))
        h_CD = pick(hidden_TD, index_C)
        z_CV = jnp.einsum("CD,VD->CV", h_CD, low_VD, preferred_element_type=compute)
        z_CV = capped(z_CV, softcap)
        if isinstance(teacher, TopK):
            ids_Ck = teacher.ids.at[index_C].get(mode="fill", fill_value=-1)
            teacher_C: Any = TopK(ids_Ck, pick(teacher.logp, index_C))
        else:
            states_TE, other_VE = teacher
            s_CE = pick(states_TE, index_C)
            low_VE = other_VE.astype(s_CE.dtype)
            teacher_C = jnp.einsum("CE,VE->CV", s_CE, low_VE, preferred_element_type=compute)
            teacher_C = capped(teacher_C, other_softcap)
        weight_C, ce_C = pick(weight_T, index_C), pick(ce_T, index_C)
        chunk_sums, dz_CV = measure(
            z_CV, teacher_C, pick(target_T, index_C), weight_C * numbers.scale, ce_C, spec
        )
        total += jnp.sum(weight_C * numbers.scale * chunk_sums.divergence + ce_C * chunk_sums.nll)
        tokens = TokenDivergence(
            *(x.at[index_C].set(y, mode="drop") for x, y in zip(tokens, chunk_sums, strict=True))
        )
        if softcap is not None:
            dz_CV *= 1.0 - jnp.square(z_CV / softcap)
        dz_CV = dz_CV.astype(hidden_TD.dtype)
        if d_hidden is not None:
            d_CD = jnp.einsum("CV,VD->CD", dz_CV, low_VD, preferred_element_type=compute)
            d_hidden = d_hidden.at[index_C].set(d_CD.astype(d_hidden.dtype), mode="drop")
        if d_head is not None:
            d_head += jnp.einsum("CV,CD->VD", dz_CV, h_CD, preferred_element_type=compute)
        return total, tokens, d_hidden, d_head

    total, tokens, d_hidden, d_head = lax.fori_loop(0, -(-count // chunk), step, start)
    d_head = None if d_head is None else d_head.astype(head_VD.dtype)
    return total, tokens, (d_hidden, d_head)


def measure(
    z_CV, teacher, target_C, weight_C, ce_C, spec: DivergenceSpec
) -> tuple[TokenDivergence, jax.Array]:
    """Compute the numbers of each token, and the gradient [C, V] of sum(weight x divergence + ce x
    nll) by the student's logits z.

    teacher: logits [C, V], or TopK of temperature 1.
    """
    numbers, axis, _ = spec
    tau = numbers.temperature
    u_CV = z_CV / tau
    if isinstance(teacher, TopK):
        tempered = TopK(teacher.ids, teacher.logp / tau)
        compared, d_CV = compare_topk(u_CV, tempered, numbers.beta, numbers.rest, axis)
    elif numbers.top_k is not None:
        tempered = take_topk(teacher / tau, numbers.top_k, axis)
        compared, d_CV = compare_topk(u_CV, tempered, numbers.beta, numbers.rest, axis)
    else:
        compared, d_CV = compare_all(u_CV, teacher / tau, numbers.beta, axis)
    lq_CV = log_softmax(z_CV, axis)
    mine_C, here_C = local_targets(target_C, z_CV.shape[1], axis)
    hit_CV = (mine_C[:, None] == jnp.arange(z_CV.shape[1])[None]) & here_C[:, None]
    nll_C = -add_up(jnp.where(hit_CV, lq_CV, 0.0), axis)
    d_CV = d_CV * (weight_C / tau)[:, None]
    if numbers.ce_weight:
        d_CV += ce_C[:, None] * (jnp.exp(lq_CV) - hit_CV)
    return TokenDivergence(*_as_zero(compared, weight_C, ce_C), nll_C), d_CV


def _as_zero(compared: ComparedTokens, weight_C, ce_C):
    """Set padding of a chunk to zero, since NaN times a weight of 0 is NaN."""
    real_C = (weight_C != 0) | (ce_C != 0)
    return ComparedTokens(*(jnp.where(real_C, field, 0.0) for field in compared))
