"""Losses of reward models: comparisons of two answers, and correctness of steps.

A score belongs to the token whose hidden state it is computed from: nothing is shifted. The slot of
a comparison points to the last tokens of its answers (data/comparisons/pairs.py), so that answers
can share their prompt. Shapes: B rows, T packed tokens, C classes.
"""

import jax
import jax.numpy as jnp

from jaxtrain.batch import Batch


def pair_loss(model, batch: Batch, center: float = 0.0):
    """Bradley-Terry: -log sigma(R_c - R_r - margin) + center (R_c + R_r)^2, summed over pairs.

    The second term centers scores at 0, which comparisons alone leave undetermined (Eisenstein et
    al. 2023, arXiv:2312.09244). batch: weights["preference"] is the weight of a pair on its slot;
    streams "chosen" and "rejected" are distances from the slot to the answers' last tokens; stream
    "margin". Returns ({"preference": sum}, metrics as {name: (sum, weight)}); the caller divides
    the sum by the weights of the whole step.
    """
    score_BT = model.scores(model.hidden(batch).hidden)[..., 0]
    weight_BT = batch.weights["preference"].astype(score_BT.dtype)
    slot_BT = weight_BT != 0
    chosen_BT, rejected_BT = (
        fetch(score_BT, batch.streams[side], slot_BT) for side in ("chosen", "rejected")
    )
    gap_BT = chosen_BT - rejected_BT
    margin_BT = batch.streams["margin"].astype(score_BT.dtype)
    loss_BT = -jax.nn.log_sigmoid(gap_BT - margin_BT)
    if center:
        loss_BT += center * (chosen_BT + rejected_BT) ** 2
    total = jnp.sum(weight_BT)

    def mean(values_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.sum(weight_BT * values_BT), total

    any_pair = jnp.any(slot_BT).astype(total.dtype)
    low_BT, high_BT = jnp.minimum(chosen_BT, rejected_BT), jnp.maximum(chosen_BT, rejected_BT)
    metrics = {
        "accuracy": mean((gap_BT > 0).astype(total.dtype)),
        "margin": mean(gap_BT),
        "mean_reward": mean((chosen_BT + rejected_BT) / 2),
        "min_reward": (jnp.min(jnp.where(slot_BT, low_BT, jnp.inf)), any_pair),
        "max_reward": (jnp.max(jnp.where(slot_BT, high_BT, -jnp.inf)), any_pair),
    }
    return {"preference": mean(loss_BT)[0]}, metrics


def fetch(values_BT: jax.Array, distance_BT: jax.Array, slot_BT: jax.Array) -> jax.Array:
    """Fetch the value at a distance from each slot [B, T]; 0 on other tokens."""
    index_BT = jnp.arange(values_BT.shape[1], dtype=distance_BT.dtype) + distance_BT
    found_BT = jnp.take_along_axis(values_BT, jnp.where(slot_BT, index_BT, 0), axis=1)
    return jnp.where(slot_BT, found_BT, 0.0)


def step_loss(model, batch: Batch):
    """Cross-entropy of the classes of labeled tokens, such as "this step is right".

    (Lightman et al. 2023, arXiv:2305.20050.) batch: weights["step"] is 1 on labeled tokens,
    streams["label"] int32 their class. Returns like `pair_loss`, with the component "step".
    """
    score_BTC = model.scores(model.hidden(batch).hidden)
    label_BT = batch.streams["label"]
    weight_BT = batch.weights["step"].astype(score_BTC.dtype)
    logp_BTC = jax.nn.log_softmax(score_BTC)
    logp_BT = jnp.take_along_axis(logp_BTC, label_BT[:, :, None], axis=2)[..., 0]
    right_BT = (jnp.argmax(score_BTC, axis=-1) == label_BT).astype(weight_BT.dtype)
    total = jnp.sum(weight_BT)
    metrics = {
        "accuracy": (jnp.sum(weight_BT * right_BT), total),
        "mean_label": (jnp.sum(weight_BT * label_BT), total),
    }
    return {"step": -jnp.sum(weight_BT * logp_BT)}, metrics
