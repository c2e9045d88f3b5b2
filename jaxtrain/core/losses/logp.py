"""Log-probability of every token of a packed row, stored on the token that it scores."""

import jax
import jax.numpy as jnp

from jaxtrain.batch import Batch
from jaxtrain.core.losses.vocabulary import gather_logp


def token_logp(
    model, batch: Batch, impl: str = "auto", temperature: jax.Array | float | None = None
):
    """Log-prob, entropy and log-sum-exp of each token given its branch.

    Where `prev` is -1 (roots, padding) the numbers are finite but mean nothing: their weight is 0.

    batch: fields [B, T]; `streams["target"]` replaces `tokens` as the ids to score where present.
    temperature: what logits are divided by, as the sampler did.
    Returns LogProbs with fields logp, entropy, lse, each float32 [B, T].
    """
    hidden_BTD, target_BT = predictions(model, batch)
    if (exact := getattr(model, "exact", None)) is not None:
        return exact.logp(model.head(), hidden_BTD, target_BT, temperature, model.logit_softcap)
    options = {"temperature": temperature, "softcap": model.logit_softcap, "impl": impl}
    return gather_logp(hidden_BTD, model.head(), target_BT, **options)


def predictions(model, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Return the hidden state [B, T, D] that predicts each token, and the ids [B, T] to predict.

    Row `prev[t]` of the hidden states predicts token t, so branches that share a parent gather the
    same row and no sequence is ever shifted.
    """
    hidden_BTD = model.hidden(batch).hidden
    predictor_BT = jnp.maximum(batch.prev, 0)
    gathered_BTD = jnp.take_along_axis(hidden_BTD, predictor_BT[:, :, None], axis=1)
    return gathered_BTD, batch.streams.get("target", batch.tokens)
