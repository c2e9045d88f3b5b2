"""EBFT's loss: a policy's objective on drawn answers, cross-entropy on the ground truth."""

import jax.numpy as jnp

from jaxtrain.batch import Batch
from jaxtrain.core.losses.logp import token_logp
from jaxtrain.methods.rl.loss import PolicyObjective, policy_terms

COMPONENT = "ce"


def ebft_loss(model, batch: Batch, objective: PolicyObjective, impl: str = "auto"):
    """`policy_loss`, and with weights["ce"] also {"ce": sum of -log p of the ground truth's tokens}
    from the same forward pass.

    The sampler's temperature is that of the drawn tokens alone.
    """
    temperature = objective.temperature
    weight_BT = batch.weights.get(COMPONENT)
    if temperature is not None and weight_BT is not None:
        temperature = jnp.where(weight_BT != 0, 1.0, temperature)
    scores = token_logp(model, batch, impl, temperature, drawable=True)
    sums, metrics = policy_terms(scores.logp, scores.entropy, batch, objective)
    if weight_BT is not None:
        weight_BT = weight_BT.astype(scores.logp.dtype)
        sums[COMPONENT] = -jnp.sum(jnp.where(weight_BT != 0, weight_BT * scores.logp, 0.0))
        metrics["ebft/ce_loss"] = sums[COMPONENT], jnp.sum(weight_BT)
    return sums, metrics
