"""Loss of several guesses of one distribution: an unrolled draft against its teacher, on the
draft's vocabulary.

    chunk of C positions:   teacher [C, E] ── full logits [C, V] ── likeliest token, is it kept?
                                           └─ logits of the kept [C, P] ── p, renormalized
                            draft [L, C, D] ── logits [L, C, P] ── q of each of the L guesses
                            loss(p, q) and its gradient ── d hidden [L, C, D], d head += [P, D]

Loops over the chunks that hold a weight. The teacher's logits are computed once for all L guesses,
and gradients in the forward pass, as in distillation.py, so that neither pass holds more than a
chunk of logits. On a mesh each device does this for its tokens and its slice of both vocabularies.

Shapes: L guesses, B rows, T positions, D the draft's features, E the teacher's, V ids, P kept ids,
C positions of a chunk.
"""

import functools
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtrain_kernels.logp_gather.slices import Axis
from jaxtrain_kernels.precision import accumulator

from jaxtrain.core.losses.divergence import add_up, likeliest, log_softmax
from jaxtrain.core.losses.topk import MAX_LOGITS
from jaxtrain.core.losses.vocabulary import place_tokens, stored_axes, whole_head
from jaxtrain.distributed.sharding import constrain

Kind = Literal["soft", "alpha", "lambda"]


@dataclass(frozen=True)
class SoftTargets:
    """The numbers of the loss. With p the teacher's distribution over the kept tokens, q the
    draft's and a = sum min(p, q), the share of p that a draft is accepted with:

    soft     -sum p log q
    alpha    -log a
    lambda   k KL(p | q) + (1 - k) (1 - a), with k = kl_scale exp(-kl_decay a) of that position,
             which carries no gradient
    """

    kind: Kind = "soft"
    kl_scale: float = 1.0
    kl_decay: float = 3.0
    chunk: int | None = None
    """Positions of a chunk; None: so many that no logits of it are more than MAX_LOGITS."""


class Teacher(NamedTuple):
    """The distributions to be guessed; no gradient flows into them."""

    states: Any
    """[B, T, E] final-normed hidden states: row t predicts the token after t."""
    head: Any
    """[V, E]."""
    draft_ids: Any
    """int32 [P]: ids of the draft's vocabulary, ascending; all V ids if it is not reduced."""


class GuessMetrics(NamedTuple):
    """Numbers of each guess, [L, B, T]; they carry no gradient and are 0 where nothing weighs."""

    hit: Any
    """1 where the draft's likeliest token is the teacher's of the whole vocabulary."""
    loss: Any
    """Before the weight; 0 where the teacher's likeliest token is not kept."""
    accepted: Any
    """a; 0 where the teacher's likeliest token is not kept."""
    in_draft: Any
    """1 where the teacher's likeliest token is kept."""


def sum_soft(
    hidden_LBTD: jax.Array,
    head_PD: jax.Array,
    teacher: Teacher,
    weight_LBT: jax.Array,
    numbers: SoftTargets,
) -> tuple[jax.Array, GuessMetrics]:
    """Return (sum of weight x loss over the positions whose likeliest token is kept, GuessMetrics).

    Gradients flow to hidden and head. The arrays may be sharded in any way.
    """
    states_BTE, head_VE, kept_P = (lax.stop_gradient(x) for x in teacher)
    rows_PE = None if len(kept_P) == len(head_VE) else constrain(head_VE[kept_P], "vocab", "embed")
    weight_LBT = weight_LBT.astype(accumulator(hidden_LBTD.dtype))

    def local(axes, hidden_LBTD, head_PD, states_BTE, head_VE, kept_P, weight_LBT, *rows):
        flat = lambda x: x.reshape(x.shape[0], -1, *x.shape[3:])  # noqa: E731
        teacher_arrays = (states_BTE.reshape(-1, states_BTE.shape[-1]), head_VE, kept_P, *rows)
        spec = SoftTargetSpec(numbers, *axes)
        outputs: Any = soft_sum(spec, flat(hidden_LBTD), head_PD, teacher_arrays, flat(weight_LBT))
        total, metrics = outputs
        return total, GuessMetrics(*(field.reshape(weight_LBT.shape) for field in metrics))

    spec_BTD, draft_axis = place_tokens(hidden_LBTD[0], head_PD)
    rows = () if rows_PE is None else (rows_PE,)
    if spec_BTD is None:
        axes = (None, None)
        return local(axes, hidden_LBTD, head_PD, states_BTE, head_VE, kept_P, weight_LBT, *rows)
    _, vocab_axis = place_tokens(states_BTE, head_VE)
    by_token = PartitionSpec(*spec_BTD[:2])
    by_guess = PartitionSpec(None, *by_token)
    shards: list[str] = []
    for axes in by_token:
        shards += [axes] if isinstance(axes, str) else axes or ()
    stored = [stored_axes(table) for table in (head_PD, head_VE, *rows)]

    def summed(hidden_LBTD, head_PD, states_BTE, head_VE, kept_P, weight_LBT, *rows):
        head_PD = whole_head(head_PD, hidden_LBTD.dtype, stored[0])
        head_VE = whole_head(head_VE, states_BTE.dtype, stored[1])
        rows = [whole_head(x, states_BTE.dtype, stored[2]) for x in rows]
        total, metrics = local(
            (draft_axis, vocab_axis),
            hidden_LBTD,
            head_PD,
            states_BTE,
            head_VE,
            kept_P,
            weight_LBT,
            *rows,
        )
        return lax.psum(total, tuple(shards)) if shards else total, metrics

    return jax.shard_map(
        summed,
        in_specs=(
            PartitionSpec(None, *by_token, None),
            PartitionSpec(draft_axis, stored[0] or None),
            PartitionSpec(*by_token, None),
            PartitionSpec(vocab_axis, stored[1] or None),
            PartitionSpec(),
            by_guess,
            *(PartitionSpec(draft_axis, stored[2] or None) for _ in rows),
        ),
        out_specs=(PartitionSpec(), by_guess),
        check_vma=False,
    )(hidden_LBTD, head_PD, states_BTE, head_VE, kept_P, weight_LBT, *rows)


class SoftTargetSpec(NamedTuple):
    """Static arguments of the compiled program, besides shapes."""

    numbers: SoftTargets
    draft_axis: Axis
    """Mesh axis of the draft's vocabulary."""
    vocab_axis: Axis
    """Mesh axis of the whole vocabulary."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def soft_sum(spec: SoftTargetSpec, hidden_LTD, head_PD, teacher_arrays, weight_LT):
    """Return (sum, GuessMetrics) of flat local positions. teacher_arrays: (states [T, E], head [V,
    E], kept ids [P], rows [P, E] of the head unless all are kept)."""
    total, metrics, _ = walk(spec, hidden_LTD, head_PD, teacher_arrays, weight_LT, None)
    return total, metrics


def _fwd(spec, hidden, head, teacher_arrays, weight):
    values = [argument.value for argument in (hidden, head, *teacher_arrays, weight)]
    needs_grad = (hidden.perturbed, head.perturbed)
    total, metrics, grads = walk(
        spec, values[0], values[1], tuple(values[2:-1]), values[-1], needs_grad
    )
    return (total, metrics), (grads, len(teacher_arrays))


def _bwd(spec: SoftTargetSpec, residuals, cotangents):
    (d_hidden, d_head), num_known = residuals
    nothing = (None,) * num_known
    g, _ = cotangents
    if isinstance(g, jax.custom_derivatives.SymbolicZero):
        return None, None, nothing, None
    if spec.draft_axis is not None:
        # Every device of the axis returned the same sum and was handed its share of g.
        g = lax.psum(g, spec.draft_axis)
    scaled = lambda x: None if x is None else (g * x.astype(g.dtype)).astype(x.dtype)  # noqa: E731
    return scaled(d_hidden), scaled(d_head), nothing, None


soft_sum.defvjp(_fwd, _bwd, symbolic_zeros=True)


def walk(spec: SoftTargetSpec, hidden_LTD, head_PD, teacher_arrays, weight_LT, needs_grad: Any):
    """Return (sum, GuessMetrics, (d hidden, d head)), computed by chunks of the positions that
    weigh.

    needs_grad: for hidden and for head, or None for neither.
    """
    states_TE, head_VE, kept_P, *rows = teacher_arrays
    (L, T, _), P, V = hidden_LTD.shape, len(head_PD), len(head_VE)
    compute = accumulator(hidden_LTD.dtype)
    chunk = spec.numbers.chunk or max(MAX_LOGITS // max(V, L * P) // 128, 1) * 128
    chunk = min(chunk, T)
    # Positions that weigh first; what fills up the last chunk lies beyond the end and is dropped.
    weighs_T = (weight_LT != 0).any(0)
    order = jnp.argsort(~weighs_T, stable=True).astype(jnp.int32)
    count = jnp.sum(weighs_T)
    order = jnp.where(jnp.arange(T) < count, order, T)
    order = jnp.pad(order, (0, -T % chunk), constant_values=T)
    low_PD, low_VE = head_PD.astype(hidden_LTD.dtype), head_VE.astype(states_TE.dtype)
    low_PE = rows[0].astype(states_TE.dtype) if rows else None
    d_hidden = d_head = None
    if needs_grad is not None and needs_grad[0]:
        d_hidden = jnp.zeros_like(hidden_LTD)
    if needs_grad is not None and needs_grad[1]:
        d_head = jnp.zeros(head_PD.shape, compute)
    numbers = GuessMetrics(*[jnp.zeros((L, T), compute)] * 4)
    start = (jnp.zeros((), compute), numbers, d_hidden, d_head)

    def step(number, carry):
        total, metrics, d_hidden, d_head = carry
        index_C = lax.dynamic_slice(order, (number * chunk,), (chunk,))
        pick = lambda x: x.at[:, index_C].get(mode="fill", fill_value=0)  # noqa: E731
        s_CE = states_TE.at[index_C].get(mode="fill", fill_value=0)
        full_CV = jnp.einsum("CE,VE->CV", s_CE, low_VE, preferred_element_type=compute)
        best_C = likeliest(full_CV, spec.vocab_axis)
        if low_PE is None:
            v_CP, kept_C = full_CV, jnp.ones(chunk, bool)
        else:
            v_CP = jnp.einsum("CE,PE->CP", s_CE, low_PE, preferred_element_type=compute)
            kept_C = holds(kept_P, best_C)
        h_LCD, weight_LC = pick(hidden_LTD), pick(weight_LT) * kept_C
        z_LCP = jnp.einsum("LCD,PD->LCP", h_LCD, low_PD, preferred_element_type=compute)
        chunk_metrics, dz_LCP = measure(z_LCP, v_CP, spec)
        real_LC = pick(weight_LT) != 0
        said_LC = kept_P[likeliest(z_LCP.reshape(-1, P), spec.draft_axis)].reshape(L, -1)
        chunk_metrics = GuessMetrics(
            jnp.where(real_LC, said_LC == best_C, False).astype(compute),
            jnp.where(real_LC & kept_C, chunk_metrics.loss, 0.0),
            jnp.where(real_LC & kept_C, chunk_metrics.accepted, 0.0),
            (real_LC & kept_C).astype(compute),
        )
        total += jnp.sum(weight_LC * chunk_metrics.loss)
        metrics = GuessMetrics(
            *(
                x.at[:, index_C].set(y, mode="drop")
                for x, y in zip(metrics, chunk_metrics, strict=True)
            )
        )
        dz_LCP = jnp.where(weight_LC[..., None] != 0, weight_LC[..., None] * dz_LCP, 0.0)
        dz_LCP = dz_LCP.astype(hidden_LTD.dtype)
        if d_hidden is not None:
            d_LCD = jnp.einsum("LCP,PD->LCD", dz_LCP, low_PD, preferred_element_type=compute)
            d_hidden = d_hidden.at[:, index_C].set(d_LCD.astype(d_hidden.dtype), mode="drop")
        if d_head is not None:
            d_head += jnp.einsum("LCP,LCD->PD", dz_LCP, h_LCD, preferred_element_type=compute)
        return total, metrics, d_hidden, d_head

    total, metrics, d_hidden, d_head = lax.fori_loop(0, -(-count // chunk), step, start)
    d_head = None if d_head is None else d_head.astype(head_PD.dtype)
    return total, metrics, (d_hidden, d_head)


def holds(kept_P: jax.Array, ids_C: jax.Array) -> jax.Array:
    """Return bool [C]: whether ascending ids contain each of others."""
    place_C = jnp.minimum(jnp.searchsorted(kept_P, ids_C), len(kept_P) - 1)
    return kept_P[place_C] == ids_C


class GuessDivergence(NamedTuple):
    """Numbers of each guess, [L, C]."""

    loss: Any
    accepted: Any


def measure(z_LCP, v_CP, spec: SoftTargetSpec) -> tuple[GuessDivergence, jax.Array]:
    """Return (numbers of each guess, gradient [L, C, P] of its loss by the draft's logits z). v:
    the teacher's logits of the same tokens."""
    numbers, axis = spec.numbers, spec.draft_axis
    lp_CP, lq_LCP = log_softmax(v_CP, axis), log_softmax(z_LCP, axis)
    p_CP, q_LCP = jnp.exp(lp_CP), jnp.exp(lq_LCP)
    a_LC = jnp.minimum(add_up(jnp.minimum(p_CP, q_LCP), axis), 1.0)
    if numbers.kind == "soft":
        return GuessDivergence(-add_up(p_CP * lq_LCP, axis), a_LC), q_LCP - p_CP
    # a grows with the logits of what the draft says too rarely.
    rare_LCP = jnp.where(q_LCP < p_CP, q_LCP, 0.0)
    da_LCP = rare_LCP - q_LCP * add_up(rare_LCP, axis)[..., None]
    if numbers.kind == "alpha":
        least = jnp.finfo(a_LC.dtype).tiny
        return GuessDivergence(-jnp.log(jnp.maximum(a_LC, least)), a_LC), -da_LCP / jnp.maximum(
            a_LC, least
        )[..., None]
    k_LC = numbers.kl_scale * jnp.exp(-numbers.kl_decay * a_LC)
    kl_LC = add_up(p_CP * (lp_CP - lq_LCP), axis)
    loss_LC = k_LC * kl_LC + (1.0 - k_LC) * (1.0 - a_LC)
    return GuessDivergence(loss_LC, a_LC), (
        k_LC[..., None] * (q_LCP - p_CP) - (1.0 - k_LC[..., None]) * da_LCP
    )
