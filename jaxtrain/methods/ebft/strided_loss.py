"""The loss of EBFT inside of documents: policy gradient of drawn blocks, likelihood of texts.

    rl = sum over drawn tokens of -log p * advantage / drawn tokens      no ratio: the draw is fresh
    ce = sum over the documents' tokens of -weight * log p / weights

Jelassi et al. 2026 (arXiv 2603.12248). A drawn token's log-prob comes from the token before it on
its own branch (`prev`), the first one's from the token before the anchor. It is that of the
distribution it was drawn from, without tokens that stand for images.

Shapes: B rows, U tokens of a row of the forest, Q of them that a component scores.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from jaxtrain.batch import Batch
from jaxtrain.core.losses.logp import of_drawable
from jaxtrain.core.losses.vocabulary import LogProbs, gather_logp, sum_logp

CE, RL = "nll", "rl"
"""The loss's components."""
ADVANTAGE, NUMBERS = "advantage", "block_numbers"
"""Streams float32: [U] of each drawn token; [U, 6] of each block, on its first token, else 0."""
NAMES = ("reward", "alignment", "diversity", "cfm_loss", "advantages_std")
"""What the numbers of a block are, behind a 1."""


@dataclass(frozen=True)
class StridedLossOptions:
    """The numbers of the loss."""

    sizes: Mapping[int, tuple[int, int]]
    """{U: (tokens of documents, drawn tokens)}: the most that a row of U tokens has."""
    temperature: float = 1.0
    """What the logits of drawn tokens are divided by."""
    train_ce: bool = True
    """Whether the likelihood has a gradient; without one it is told all the same."""


def strided_loss(model, batch: Batch, numbers: StridedLossOptions, impl: str = "auto"):
    """({"rl": sum, "nll": sum}, metrics) of rows [B, U] with the streams ADVANTAGE and NUMBERS."""
    documents, drawn = numbers.sizes[batch.tokens.shape[1]]
    hidden_BUD, head_VD = model.hidden(batch).hidden, model.head()
    rl_BU, ce_BU = batch.weights[RL], batch.weights[CE]
    advantage_BU = batch.streams[ADVANTAGE].astype(rl_BU.dtype)
    options = {"softcap": model.logit_softcap, "impl": impl}
    warm = options | {"temperature": numbers.temperature}
    sum_drawn = partial(sum_drawable, model, options=warm)
    gain, entropy = score(hidden_BUD, batch, rl_BU, advantage_BU, drawn, sum_drawn)
    if not numbers.train_ce:
        hidden_BUD, head_VD = jax.lax.stop_gradient((hidden_BUD, head_VD))

    def sum_likely(hidden_BQD, target_BQ, weight_BQ):
        return sum_logp(hidden_BQD, head_VD, target_BQ, weight_BQ, **options)

    likely, _ = score(hidden_BUD, batch, ce_BU, jnp.ones_like(ce_BU), documents, sum_likely)
    blocks, *values = batch.streams[NUMBERS].sum((0, 1))
    return {RL: -gain, CE: -likely}, {
        "ebft/rl_loss": (-gain, jnp.sum(rl_BU)),
        "ebft/ce_loss": (-likely, jnp.sum(ce_BU)),
        "entropy": (entropy, jnp.sum(rl_BU)),
        **{f"ebft/{name}": (x, blocks) for name, x in zip(NAMES, values, strict=True)},
    }


def sum_drawable(model, hidden_BQD, target_BQ, weight_BQ, options: Mapping):
    """`sum_logp` of the distribution that samplers draw from."""
    head_VD = model.head()
    if not model.never_drawn:
        return sum_logp(hidden_BQD, head_VD, target_BQ, weight_BQ, **options)
    tokens = gather_logp(hidden_BQD, head_VD, target_BQ, **options)
    tokens = of_drawable(model, tokens, hidden_BQD, options["temperature"])
    return jnp.sum(weight_BQ.astype(tokens.logp.dtype) * tokens.logp), tokens


def score(
    hidden_BUD,
    batch: Batch,
    weight_BU,
    factor_BU,
    most: int,
    sum_tokens: Callable[..., tuple[jax.Array, LogProbs]],
):
    """(sum of weight x factor x log-prob, sum of weight x entropy) over the tokens that have a
    weight, at most `most` of a row; no other token meets the head. sum_tokens: `sum_logp` of
    (hidden states, targets, weights)."""
    U = weight_BU.shape[1]

    def of_row(weight_U: jax.Array) -> jax.Array:
        return jnp.nonzero(weight_U != 0, size=most, fill_value=U)[0].astype(jnp.int32)

    index_BQ = jax.vmap(of_row)(weight_BU)

    def at(values_BU: jax.Array) -> jax.Array:
        gathered_BQ = jnp.take_along_axis(values_BU, jnp.minimum(index_BQ, U - 1), axis=1)
        return jnp.where(index_BQ < U, gathered_BQ, jnp.zeros_like(gathered_BQ))

    before_BQ = jnp.maximum(at(batch.prev), 0)
    hidden_BQD = jnp.take_along_axis(hidden_BUD, before_BQ[:, :, None], axis=1)
    weight_BQ = at(weight_BU)
    total, tokens = sum_tokens(hidden_BQD, at(batch.tokens), weight_BQ * at(factor_BU))
    entropy_BQ = tokens.entropy
    return total, jnp.sum(weight_BQ.astype(entropy_BQ.dtype) * entropy_BQ)
