"""Negative log-likelihood: SFT, pre-training text and trees alike, told apart by weights alone."""

import jax.numpy as jnp

from jaxtrain.batch import Batch
from jaxtrain.core.losses.logp import predictions
from jaxtrain.core.losses.vocabulary import sum_logp


def nll_loss(model, batch: Batch, impl: str = "auto"):
    """Weighted sum of -log p over the trained tokens of rows [B, T].

    Returns ({"nll": float32 sum}, metrics as {name: (sum, weight)}). The caller divides by the sum
    of `weights["nll"]` over the whole optimizer step, which makes accumulation over microsteps and
    devices equal to one large batch. The weights are known before the logits are, so gradients are
    made in the same pass.
    """
    hidden_BTD, target_BT = predictions(model, batch)
    weight_BT = batch.weights["nll"]
    total, scores = sum_logp(
        hidden_BTD, model.head(), target_BT, weight_BT, softcap=model.logit_softcap, impl=impl
    )
    weight_BT = weight_BT.astype(scores.entropy.dtype)
    entropy = jnp.sum(weight_BT * scores.entropy)
    return {"nll": -total}, {"entropy": (entropy, jnp.sum(weight_BT))}
