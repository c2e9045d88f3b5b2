"""Masked diffusion (LLaDA, arXiv:2502.09992): weighted negative log-likelihood of masked tokens.

The batch defines the masked tokens, their weights (methods/diffusion/masks.py) and the
bidirectional attention, so that this is the likelihood of given tokens.
"""

import jax.numpy as jnp

from jaxtrain.batch import Batch
from jaxtrain.core.losses.logp import predictions
from jaxtrain.core.losses.vocabulary import sum_logp

COMPONENT = "masked"
"""Component of the loss."""


def diffusion_loss(model, batch: Batch, shift: bool = True, impl: str = "auto"):
    """Weighted sum of -log p over the masked tokens of rows [B, T]: ({"masked": sum}, metrics).

    shift: row `prev[t]` of the hidden states predicts token t, as in a causal model; else row t.
    batch: `tokens` with masks, streams "target" (the true ids) and "mask_ratio" (p, 0 on unmasked
    tokens). Metrics as (sum, weight): accuracy and ce_loss over masked tokens; bound, in nats per
    token, each prediction weighted by 1 / p whatever the loss weights; avg_p_mask, p of the masked
    tokens.
    """
    if shift:
        hidden_BTD, target_BT = predictions(model, batch)
    else:
        hidden_BTD, target_BT = model.hidden(batch).hidden, batch.streams["target"]
    weight_BT, ratio_BT = batch.weights["nll"], batch.streams["mask_ratio"]
    total, scores = sum_logp(
        hidden_BTD, model.head(), target_BT, weight_BT, softcap=model.logit_softcap, impl=impl
    )
    assert scores.top is not None, "both ops tell the likeliest token"
    masked_BT = ratio_BT > 0
    count = jnp.sum(masked_BT.astype(scores.logp.dtype))
    inverse_BT = jnp.where(masked_BT, 1.0 / jnp.where(masked_BT, ratio_BT, 1.0), 0.0)
    right_BT = masked_BT & (scores.logp >= scores.top)
    return {COMPONENT: -total}, {
        "accuracy": (jnp.sum(right_BT.astype(scores.logp.dtype)), count),
        "ce_loss": (-jnp.sum(jnp.where(masked_BT, scores.logp, 0.0)), count),
        "bound": (-jnp.sum(inverse_BT * scores.logp), jnp.sum(inverse_BT)),
        "avg_p_mask": (jnp.sum(ratio_BT), count),
    }
