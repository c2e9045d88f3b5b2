"""The loss of a multi-token prediction head, beside whatever loss a method has.

    method's loss ── model.hidden(batch) ──> states ──┬─> its own sums
                                                      └─> head (models.mtp) ─> "mtp"

"decoupled" cuts all gradients between the head and the rest: the model trains as without a head.
"joint" lets them through to the states, the embedding and the output projection.

A token counts for the head as much as for the method, its largest weight in any component, if there
are two tokens before it on its branch: the head guesses it from the first of them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.batch import Batch
from jaxtrain.core.losses.balance import OutputCollector
from jaxtrain.core.losses.vocabulary import sum_logp

COMPONENT = "mtp"


class HeadLoss(NamedTuple):
    """Options of the loss."""

    weight: float
    """Factor in the total loss."""
    joint: bool = False
    """True if its gradients reach the model."""
    impl: str = "auto"
    """Backend of the log-prob op."""

    def wrap(self, loss: Callable) -> Callable:
        """Return `loss` (model, batch) -> (sums, metrics) with the component "mtp"."""

        def with_head(model: Any, batch: Batch):
            watched = OutputCollector(model)
            sums, metrics = loss(watched, batch)
            # Of a loss that runs the model several times the first pass is over the batch itself.
            total, weight = self.sum(model, watched.outputs[0].hidden, batch)
            return {**sums, COMPONENT: total}, {**metrics, "mtp/nll": (total, weight)}

        return with_head

    def sum(self, model: Any, hidden_BTD: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Return (sum of -w log p over the tokens of rows [B, T], sum of the weights w)."""
        source = model if self.joint else Frozen(model)
        hidden_BTD = hidden_BTD if self.joint else cut(hidden_BTD)
        state_BTD = model.mtp.read_rows(source, hidden_BTD, batch)
        predictor_BT = jnp.maximum(batch.prev, 0)
        gathered_BTD = jnp.take_along_axis(state_BTD, predictor_BT[:, :, None], axis=1)
        weight_BT = batch.weights[COMPONENT]
        total, _ = sum_logp(
            gathered_BTD,
            source.head(),
            batch.tokens,
            weight_BT,
            softcap=model.logit_softcap,
            freeze_head=not self.joint,
            impl=self.impl,
        )
        return -total, jnp.sum(weight_BT).astype(total.dtype)


class Frozen:
    """Embedding and head of a model, through which no gradients pass."""

    def __init__(self, model: Any):
        self.model = model

    def embed(self, tokens_BT: jax.Array) -> jax.Array:
        """Return the embeddings [B, T, D] of tokens."""
        return cut(self.model.embed(tokens_BT))

    def head(self) -> jax.Array:
        """Return the output projection [V, D]."""
        return cut(self.model.head())


def cut(x: jax.Array) -> jax.Array:
    """Return x without gradients, behind a barrier: where XLA keeps barriers, not on CPUs, it fuses
    nothing across, which could round the model's own gradients differently."""
    return jax.lax.optimization_barrier(jax.lax.stop_gradient(x))


def add_weights(batch: Batch) -> Batch:
    """Return a host batch [..., B, T] with the weights of the head's loss."""
    weights = np.stack([np.abs(np.asarray(w)) for w in batch.weights.values()]).max(0)
    prev = np.asarray(batch.prev)
    before = np.take_along_axis(prev, np.maximum(prev, 0), axis=-1)
    counts = (prev >= 0) & (before >= 0)
    return batch._replace(weights={**batch.weights, COMPONENT: np.where(counts, weights, 0)})
