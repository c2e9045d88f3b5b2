"""Log-probability of every token of a packed row, stored on the token that it scores."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.batch import Batch
from jaxtrain.core.losses.vocabulary import LogProbs, gather_logp


def token_logp(
    model,
    batch: Batch,
    impl: str = "auto",
    temperature: jax.Array | float | None = None,
    *,
    drawable: bool = False,
) -> LogProbs:
    """Log-prob, entropy and log-sum-exp of each token given its branch.

    Where `prev` is -1 (roots, padding) the numbers are finite but mean nothing: their weight is 0.

    batch: fields [B, T]; `streams["target"]` replaces `tokens` as the ids to score where present.
    temperature: what logits are divided by, as the sampler did. drawable: of the distribution that
    samplers draw from, without the tokens that stand for images (model.never_drawn).
    Returns LogProbs with fields logp, entropy, lse, each float32 [B, T].
    """
    hidden_BTD, target_BT = predictions(model, batch)
    if (exact := getattr(model, "exact", None)) is not None:
        return exact.logp(model.head(), hidden_BTD, target_BT, temperature, model.logit_softcap)
    options = {"temperature": temperature, "softcap": model.logit_softcap, "impl": impl}
    log_probs = gather_logp(hidden_BTD, model.head(), target_BT, **options)
    return of_drawable(model, log_probs, hidden_BTD, temperature) if drawable else log_probs


def of_drawable(
    model, log_probs: LogProbs, hidden_BTD: jax.Array, temperature: jax.Array | float | None = None
) -> LogProbs:
    """Return log-probs [B, T] that hidden states predict at a temperature without the share of
    model.never_drawn."""
    if not model.never_drawn:
        return log_probs
    head_KD = jnp.take(model.head(), np.array(model.never_drawn), axis=0)
    logits_BTK = model.logits_of(head_KD, hidden_BTD)
    if temperature is not None:
        logits_BTK = logits_BTK / jnp.broadcast_to(temperature, log_probs.lse.shape)[..., None]
    return exclude_tokens(log_probs, logits_BTK)


def exclude_tokens(log_probs: LogProbs, logits_BTK: jax.Array) -> LogProbs:
    """Return log-probs [B, T] of the distribution without K tokens, given these tokens' logits.

    The error is that of rounding divided by the share of the other tokens, which is taken to be at
    least a millionth.
    """
    lse_BT = log_probs.lse
    share_BTK = jnp.exp(logits_BTK - lse_BT[..., None])
    total_BT = jnp.minimum(share_BTK.sum(-1), 1 - 1e-6)
    shift_BT = jnp.log1p(-total_BT)
    mean_BT = lse_BT - log_probs.entropy - (share_BTK * logits_BTK).sum(-1)
    return log_probs._replace(
        logp=log_probs.logp - shift_BT,
        entropy=lse_BT + shift_BT - mean_BT / (1 - total_BT),
        lse=lse_BT + shift_BT,
        top=None,
    )


def predictions(model, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Return the hidden state [B, T, D] that predicts each token, and the ids [B, T] to predict.

    Row `prev[t]` of the hidden states predicts token t, so branches that share a parent gather the
    same row and no sequence is ever shifted.
    """
    hidden_BTD = model.hidden(batch).hidden
    predictor_BT = jnp.maximum(batch.prev, 0)
    gathered_BTD = jnp.take_along_axis(hidden_BTD, predictor_BT[:, :, None], axis=1)
    return gathered_BTD, batch.streams.get("target", batch.tokens)
