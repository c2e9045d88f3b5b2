"""Negative log-likelihood: SFT, pre-training text and trees alike, told apart by weights alone."""

import jax.numpy as jnp

from jaxtrain.batch import Batch
from jaxtrain.losses.logp import token_logp


def nll_loss(model, batch: Batch, impl: str = "auto"):
    """Weighted sum of -log p over the trained tokens of rows [B, T].

    Returns ({"nll": float32 sum}, metrics as {name: (sum, weight)}). The caller divides by the sum
    of `weights["nll"]` over the whole optimizer step, which makes accumulation over microsteps and
    devices equal to one large batch.
    """
    scores = token_logp(model, batch, impl)
    weight_BT = batch.weights["nll"].astype(scores.logp.dtype)
    total = jnp.sum(weight_BT)
    nll = -jnp.sum(weight_BT * scores.logp)
    entropy = jnp.sum(weight_BT * scores.entropy)
    return {"nll": nll}, {"entropy": (entropy, total)}
