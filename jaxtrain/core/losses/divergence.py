"""Divergence of a student's distribution from a teacher's, token by token, with its gradient.

With p the teacher's probabilities of a token, q the student's, both of logits / temperature:

    beta 0       forward KL    sum p (log p - log q)         covers all modes of the teacher
    beta 1       reverse KL    sum q (log q - log p)         concentrates on its main modes
    in between   generalized Jensen-Shannon: beta KL(p | m) + (1 - beta) KL(q | m),
                               m = beta p + (1 - beta) q

This is the convention of GKD (arXiv 2306.13649) and of TRL's GKDTrainer, including its
special cases: the formula in between vanishes at beta 0 and 1, so the two KLs replace it there.
They are its limits after division by beta and by 1 - beta: at 0.1 the values are about a tenth of
those at 0. Nothing is multiplied by temperature^2 here.

With the teacher's k most likely tokens instead of the whole vocabulary V, `rest` selects how all
other tokens are treated:

    bucket        both put theirs into one more category; never more than the divergence over V
    renormalize   both are divided by what they give to the k: conditional distributions
    teacher       the teacher's alone is divided; the student's are those over V (forward KL only)

Gradients are those of logits / temperature, which for every row of the table have the form
q_i (slope_i - sum q slope). Shapes: C tokens, V ids (of this device's slice), k ids a token.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtrain_kernels.logp_gather.slices import Axis, across, local_targets

from jaxtrain.core.losses.topk import TopK, log_softmax

Rest = Literal["bucket", "renormalize", "teacher"]
LEAST = 1e-9
"""Least share of the bucket of all other tokens: the logarithm of less would be noise."""


class ComparedTokens(NamedTuple):
    """Numbers of each token, [C]."""

    divergence: Any
    teacher_entropy: Any
    """Nats, of the compared distribution: at the temperature, over the k tokens if there are k."""
    student_entropy: Any
    agree: Any
    """1 where both find the same token most likely."""


def diverge(lp, lq, beta: float):
    """Return each category's part of the divergence, from log-probs of teacher and student."""
    p, q = jnp.exp(lp), jnp.exp(lq)
    if beta == 0.0:
        return _times(p, lp - lq)
    if beta == 1.0:
        return _times(q, lq - lp)
    lm = mixture(lp, lq, beta)
    return beta * _times(p, lp - lm) + (1.0 - beta) * _times(q, lq - lm)


def mixture(lp, lq, beta: float):
    """Return log(beta p + (1 - beta) q)."""
    return jnp.logaddexp(lp + jnp.log(beta), lq + jnp.log1p(-beta))


def pulled(lp, lq, beta: float):
    """Return q times the divergence's slope by log q, up to multiples of q. These cancel if the
    categories cover the whole distribution."""
    if beta == 0.0:
        return -jnp.exp(lp)
    if beta == 1.0:
        return _times(jnp.exp(lq), lq - lp)
    return (1.0 - beta) * _times(jnp.exp(lq), lq - mixture(lp, lq, beta))


def compare_all(u_CV, v_CV, beta: float, axis: Axis = None):
    """Return (ComparedTokens, gradient [C, V] by u) over the whole vocabulary. u, v: logits /
    temperature of student and teacher; with `axis`, this device's slices along it."""
    lq_CV, lp_CV = log_softmax(u_CV, axis), log_softmax(v_CV, axis)
    compared = ComparedTokens(
        add_up(diverge(lp_CV, lq_CV, beta), axis),
        -add_up(_times(jnp.exp(lp_CV), lp_CV), axis),
        -add_up(_times(jnp.exp(lq_CV), lq_CV), axis),
        (likeliest(u_CV, axis) == likeliest(v_CV, axis)).astype(u_CV.dtype),
    )
    if beta == 0.0:
        return compared, jnp.exp(lq_CV) - jnp.exp(lp_CV)
    pull_CV = pulled(lp_CV, lq_CV, beta)
    return compared, pull_CV - jnp.exp(lq_CV) * add_up(pull_CV, axis)[:, None]


def compare_topk(u_CV, teacher: TopK, beta: float, rest: Rest, axis: Axis = None):
    """Return (ComparedTokens, gradient [C, V] by u) over the teacher's k likeliest tokens.

    teacher.logp: of logits / temperature, over the whole vocabulary; for "bucket" exactly so, for
    the others up to a constant of each token.
    """
    rows_C1 = jnp.arange(u_CV.shape[0])[:, None]
    mine_Ck, here_Ck = local_targets(teacher.ids, u_CV.shape[1], axis)
    there_Ck = teacher.ids >= 0
    place_Ck = jnp.where(here_Ck & there_Ck, mine_Ck, u_CV.shape[1])  # beyond the end: dropped
    lq_CV = log_softmax(u_CV, axis)
    taken_Ck = lq_CV.at[rows_C1, place_Ck].get(mode="fill", fill_value=0.0)
    lq_Ck = jnp.where(there_Ck, across(lax.psum, taken_Ck, axis), -jnp.inf)
    lp_Ck = jnp.where(there_Ck, teacher.logp.astype(u_CV.dtype), -jnp.inf)
    if rest == "bucket":
        others_CV = jnp.exp(lq_CV).at[rows_C1, place_Ck].set(0.0, mode="drop")
        q_rest_C = jnp.maximum(add_up(others_CV, axis), LEAST)
        p_rest_C = jnp.maximum(1.0 - jnp.exp(lp_Ck).sum(-1), LEAST)
        lp_Ck = jnp.concatenate([lp_Ck, jnp.log(p_rest_C)[:, None]], -1)
        lq_Ck = jnp.concatenate([lq_Ck, jnp.log(q_rest_C)[:, None]], -1)
    else:
        lp_Ck = jax.nn.log_softmax(lp_Ck)
        lq_Ck = jax.nn.log_softmax(lq_Ck) if rest == "renormalize" else lq_Ck
    q_Ck, pull_Ck = jnp.exp(lq_Ck), pulled(lp_Ck, lq_Ck, beta)
    whole_C1 = pull_Ck.sum(-1, keepdims=True)
    if rest == "renormalize":
        d_CV, d_Ck = jnp.zeros_like(u_CV), pull_Ck - q_Ck * whole_C1
    elif rest == "teacher":
        assert beta == 0.0, "a reverse KL to what the teacher never says is infinite"
        d_CV, d_Ck = -jnp.exp(lq_CV) * whole_C1, pull_Ck
    else:
        share_C1 = (pull_Ck[:, -1] / q_rest_C)[:, None]
        d_CV = jnp.exp(lq_CV) * (share_C1 - whole_C1)
        d_Ck = pull_Ck[:, :-1] - q_Ck[:, :-1] * share_C1
    d_CV = d_CV.at[rows_C1, place_Ck].add(d_Ck.astype(d_CV.dtype), mode="drop")
    best_C = jnp.take_along_axis(teacher.ids, _first(lp_Ck, teacher.ids), axis=-1)[:, 0]
    compared = ComparedTokens(
        diverge(lp_Ck, lq_Ck, beta).sum(-1),
        -_times(jnp.exp(lp_Ck), lp_Ck).sum(-1),
        -_times(q_Ck, lq_Ck).sum(-1),
        (likeliest(u_CV, axis) == best_C).astype(u_CV.dtype),
    )
    return compared, d_CV


def likeliest(z_CV, axis: Axis = None):
    """Return the argmax over the whole vocabulary, int32 [C]; the lowest id among equals."""
    best_C = z_CV.argmax(-1).astype(jnp.int32)
    if axis is None:
        return best_C
    value_C = z_CV.max(-1)
    best_C += lax.axis_index(axis) * z_CV.shape[1]
    wins_C = value_C == lax.pmax(value_C, axis)
    return lax.pmin(jnp.where(wins_C, best_C, jnp.iinfo(jnp.int32).max), axis)


def add_up(x_CV, axis: Axis = None):
    """Sum over the whole vocabulary."""
    return across(lax.psum, x_CV.sum(-1), axis)


def _first(lp_Ck, ids_Ck):
    """Return the place of the most likely of the k tokens, int32 [C, 1], without the bucket."""
    return lp_Ck[:, : ids_Ck.shape[1]].argmax(-1)[:, None]


def _times(p, x):
    """Return p x, and 0 where p is 0 even if x is not finite."""
    return jnp.where(p > 0, p * jnp.where(p > 0, x, 0.0), 0.0)
