"""The log-probability of every token of a packed row, stored on the token that it scores."""

import jax.numpy as jnp
from jaxtrain_kernels import logp_gather

from jaxtrain.batch import Batch


def token_logp(model, batch: Batch, impl: str = "auto", temperature: float | None = None):
    """Log-prob, entropy and log-sum-exp of each token given its branch.

    Row `prev[t]` of the hidden states predicts token t, so branches that share a parent gather the
    same row and no sequence is ever shifted. Where `prev` is -1 (roots, padding) the numbers are
    finite but mean nothing: their weight is 0.

    batch: fields [B, T]; `streams["target"]` replaces `tokens` as the ids to score where present.
    temperature: what logits are divided by, as the sampler did.
    Returns LogProbs with fields logp, entropy, lse, each float32 [B, T].
    """
    hidden_BTD = model.hidden(batch)
    rows, length, width = hidden_BTD.shape
    predictor_BT = jnp.maximum(batch.prev, 0)
    gathered_BTD = jnp.take_along_axis(hidden_BTD, predictor_BT[:, :, None], axis=1)
    target_BT = batch.streams.get("target", batch.tokens)
    result = logp_gather(
        gathered_BTD.reshape(rows * length, width),
        model.head(),
        target_BT.reshape(-1),
        temperature=temperature,
        impl=impl,
    )
    return type(result)(*(field.reshape(rows, length) for field in result))
