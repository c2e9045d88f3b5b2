"""The loss of an Eagle3 draft: in every step of its unroll, what the target says comes next.

    tokens     p  q  r  s  t      a chain; the target's row q says what follows q
    step 0        q  r  s  t      row q, the pair (state p, token q), guesses what follows q
    step 1        q' r' s'        row q with its own state and token r guesses what follows r
    step 2        q" r"           row q with its own state again and token s: what follows s

Several rows guess what follows a token, one in each step, so the target's logits are made once for
all of them (soft_targets.py). At a fork a row goes on along the child that the stream NEXT names,
and counts for all branches through its pair.

A guess weighs as much as the trained tokens that stand in its place in the data, times `decay` **
step, and nothing where the target's likeliest token is none that the draft can say. Each step's
denominator is the sum of all trained tokens' weights, whatever the target finds likeliest: so
accumulation is exact, and leaving out tokens makes no loss larger.

Shapes: L steps, B rows, T tokens, D features.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.batch import NEXT, Batch
from jaxtrain.methods.drafts.soft_targets import GuessMetrics, SoftTargets, Teacher, sum_soft
from jaxtrain.methods.drafts.target_states import read_target
from jaxtrain.models.eagle3 import Model, follow

COMPONENT = "draft"
"""The loss's one component, of which the batch has the denominator."""
BRANCHES, GUESS = "branches", "guess"
"""Streams, of each token: the branches through it (int32), and what a guess of what follows it
weighs for each of them (float32)."""


@dataclass(frozen=True)
class Unroll:
    """The numbers of the loss."""

    length: int = 7
    """L."""
    decay: float = 0.8
    """Factor of each further step."""
    targets: SoftTargets = SoftTargets()


def eagle3_loss(draft: Model, target: Any, batch: Batch, numbers: Unroll):
    """({"draft": sum over all guesses}, metrics) of rows [B, T]; target: a Decoder, or its ends
    where the batch has the target's states. Gradients flow to the draft alone."""
    states = read_target(target, batch, draft.capture, last=True)
    assert states.last is not None, "asked for"
    next_BT = batch.streams[NEXT]
    rows = draft.unroll(target, states.captured, batch, next_BT, numbers.length)
    hidden_LBTD, weight_LBT = align(rows, batch)
    decay_L = jnp.asarray([numbers.decay**i for i in range(numbers.length)], weight_LBT.dtype)
    teacher = Teacher(states.last, target.head(), draft.kept_ids())
    total, guesses = sum_soft(
        hidden_LBTD, draft.head(), teacher, weight_LBT * decay_L[:, None, None], numbers.targets
    )
    return {COMPONENT: total}, describe(guesses, weight_LBT, next_BT)


def align(rows: list[jax.Array], batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Return (states [L, B, T, D], weights [L, B, T]) of the guesses of what follows each token,
    from the unroll's rows; a weight is 0 if no row of that step guesses it."""
    next_BT, branches_BT = batch.streams[NEXT], batch.streams[BRANCHES]
    guess_BT = batch.streams[GUESS]
    place_BT = jnp.broadcast_to(jnp.arange(next_BT.shape[1], dtype=jnp.int32), next_BT.shape)
    valid = jnp.ones(next_BT.shape, bool)
    hidden, weights = [], []
    for number, row_BTD in enumerate(rows):
        if number:
            before_BT = jnp.where(valid, pick(batch.prev, place_BT), -1)
            valid = (before_BT >= 0) & (pick(next_BT, before_BT) == place_BT)
            place_BT = jnp.where(valid, before_BT, 0)
            row_BTD = jnp.take_along_axis(row_BTD, place_BT[:, :, None], axis=1)
        paired = valid & (pick(batch.prev, place_BT) >= 0)
        hidden.append(row_BTD)
        weights.append(jnp.where(paired, guess_BT * pick(branches_BT, place_BT), 0.0))
    return jnp.stack(hidden), jnp.stack(weights)


def describe(guesses: GuessMetrics, weight_LBT: jax.Array, next_BT: jax.Array) -> dict[str, Any]:
    """Weighted means as (sum, weight). acc/1 to acc/L, and acc of all: whether a guess is the
    target's likeliest token. kept: whether the draft can say that one. overlap: the share of the
    target's distribution that a sampled guess would meet. accept_len: 1 and the guesses of a row
    up to the first that is wrong."""
    weight_LBT = weight_LBT.astype(guesses.hit.dtype)
    weight_L = weight_LBT.sum((1, 2))
    hits_L = jnp.sum(weight_LBT * guesses.hit, axis=(1, 2))
    metrics = {f"acc/{i + 1}": (hits_L[i], weight_L[i]) for i in range(len(weight_L))}
    total_weight = weight_L.sum()
    metrics["acc"] = (hits_L.sum(), total_weight)
    for name, values in (("overlap", guesses.accepted), ("kept", guesses.in_draft)):
        metrics[name] = (jnp.sum(weight_LBT * values), total_weight)
    place_BT = jnp.broadcast_to(jnp.arange(next_BT.shape[1], dtype=jnp.int32), next_BT.shape)
    run_BT = jnp.ones(next_BT.shape, guesses.hit.dtype)
    length_BT = run_BT
    for hit_BT in guesses.hit:
        right_BT = jnp.where(place_BT >= 0, pick(hit_BT, place_BT), 0.0)
        run_BT = run_BT * right_BT
        length_BT = length_BT + run_BT
        place_BT = follow(next_BT, place_BT)
    metrics["accept_len"] = (jnp.sum(weight_LBT[0] * length_BT), weight_L[0])
    return lax.stop_gradient(metrics)


def pick(values_BT: jax.Array, index_BT: jax.Array) -> jax.Array:
    """Gather values at positions of the same row; below 0: arbitrary values."""
    return jnp.take_along_axis(values_BT, jnp.maximum(index_BT, 0), axis=1)
