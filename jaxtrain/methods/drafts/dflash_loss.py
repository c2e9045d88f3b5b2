"""The loss of DFlash: negative log-likelihood of the tokens of a block, weighted by their place.

    place      0      1      2      3         a block of 4 at token t
    stands for t      t+1    t+2    t+3       each place guesses the token that it stands for
    weight     0      1      e^-1/g e^-2/g    times the token's own, 0 beyond the end

Shapes: B rows, T packed tokens, A blocks of K places, J = K - 1 guesses of each, Q = A * J.
"""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

from jaxtrain.batch import ANCHOR, Batch
from jaxtrain.core.losses.vocabulary import gather_logp, sum_logp
from jaxtrain.methods.drafts.target_states import read_target

COMPONENT = "draft"
"""The loss's one component."""
WEIGHTS = "nll"
"""Weights of the tokens to guess, divided by the branches through each
(methods/drafts/anchors.py)."""
Weighting = Literal["decay", "dpace", "cumulative-confidence-only", "continuation-value-only"]


@dataclass(frozen=True)
class DFlashLossOptions:
    """The numbers of the loss; methods/drafts/dflash_config.py says what they mean."""

    num_anchors: int
    decay: float | None = 7.0
    weighting: Weighting = "decay"
    alpha: float = 0.5


def dflash_loss(draft, target, batch: Batch, numbers: DFlashLossOptions, impl: str = "auto"):
    """Weighted sum over the guesses of rows [B, T]: ({"draft": sum}, metrics). The target, a
    Decoder or its ends, gets no gradient.

    Metrics: acc, the share of right guesses, and acc/1 ... acc/J by place; accept_len, the tokens
    of a verified block, the one that the target draws itself included, if each guess before a
    wrong one is kept.
    """
    states = read_target(target, batch, draft.capture)
    blocks = draft.hidden(target, batch, states.captured, numbers.num_anchors)
    B, A, K, D = blocks.hidden.shape

    def take(values_BT: jax.Array, index_BAJ: jax.Array) -> jax.Array:
        flat_BQ = jnp.maximum(index_BAJ, 0).reshape(B, -1)
        values = jnp.take_along_axis(values_BT, flat_BQ, axis=1).reshape(index_BAJ.shape)
        return jnp.where(index_BAJ >= 0, values, jnp.zeros_like(values))

    weights_BT = batch.weights[WEIGHTS]
    branches_BA1 = take(batch.streams[ANCHOR], blocks.index[:, :, :1]).astype(weights_BT.dtype)
    weight_BAK = branches_BA1 * take(weights_BT, blocks.index)
    weight_BAJ = weight_BAK[:, :, 1:]
    label_BQ = take(batch.tokens, blocks.index[:, :, 1:]).reshape(B, -1)
    # The first place has no guess: neither hidden states nor logits of it are looked at.
    hidden_BQD = blocks.hidden[:, :, 1:].reshape(B, -1, D)
    head_VD = target.head()
    if numbers.weighting == "decay":
        place_J = jnp.arange(K - 1, dtype=weight_BAJ.dtype)
        factor_J = jnp.ones_like(place_J)
        if numbers.decay is not None:
            factor_J = jnp.exp(-place_J / numbers.decay)
        weight_BQ = (weight_BAJ * factor_J).reshape(B, -1)
        total, scored = sum_logp(
            hidden_BQD, head_VD, label_BQ, weight_BQ, freeze_head=True, impl=impl
        )
    else:
        scored = gather_logp(hidden_BQD, head_VD, label_BQ, freeze_head=True, impl=impl)
        logp_BAJ = scored.logp.reshape(B, A, K - 1)
        known_BAJ = jax.lax.stop_gradient(logp_BAJ)
        factor_BAJ = confidence(known_BAJ, weight_BAJ > 0, numbers.weighting, numbers.alpha)
        total = jnp.sum(weight_BAJ * factor_BAJ * logp_BAJ)
    assert scored.top is not None, "both ops tell the likeliest token"
    right_BAJ = (scored.logp >= scored.top).reshape(B, A, K - 1)
    return {COMPONENT: -total}, measure(right_BAJ, weight_BAJ, weight_BAK[:, :, 0])


def confidence(
    logp_BAJ: jax.Array, valid_BAJ: jax.Array, weighting: Weighting, alpha: float
) -> jax.Array:
    """SpecForge's factors by the draft's own probabilities of the right tokens, in [B, A, J]."""
    smooth_BAJ = jnp.where(valid_BAJ, (1 - alpha) * jnp.exp(logp_BAJ) + alpha, 1.0)
    prefix_BAJ = jnp.cumprod(smooth_BAJ, axis=-1)
    if weighting == "cumulative-confidence-only":
        return prefix_BAJ
    reached_BAJ = jnp.where(valid_BAJ, prefix_BAJ, 0.0)
    value_BAJ = jnp.flip(jnp.cumsum(jnp.flip(reached_BAJ, -1), axis=-1), -1)
    return value_BAJ if weighting == "dpace" else value_BAJ / prefix_BAJ


def measure(right_BAJ: jax.Array, weight_BAJ: jax.Array, block_BA: jax.Array) -> dict:
    """Metrics as (sum, weight); block_BA: weights of whole blocks."""
    valid_BAJ = weight_BAJ > 0
    hits_J = jnp.sum(jnp.where(right_BAJ, weight_BAJ, 0.0), axis=(0, 1))
    guesses_J = jnp.sum(weight_BAJ, axis=(0, 1))
    kept_BAJ = jnp.cumprod(right_BAJ | ~valid_BAJ, axis=-1) * valid_BAJ
    length_BA = 1.0 + jnp.sum(kept_BAJ, axis=-1).astype(block_BA.dtype)
    by_place = {f"acc/{j + 1}": (hits_J[j], guesses_J[j]) for j in range(len(hits_J))}
    return {
        "accept_len": (jnp.sum(block_BA * length_BA), jnp.sum(block_BA)),
        "acc": (jnp.sum(hits_J), jnp.sum(guesses_J)),
        **by_place,
    }
